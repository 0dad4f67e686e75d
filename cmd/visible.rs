//! Texts of servers and files, made safe to print: none can forge a line of ours,
//! move the cursor or colour the terminal.

/// Makes a text safe to print within a line: control characters, line
/// separators and marks that turn the writing direction become escapes.
pub(crate) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        let hidden = letter.is_control()
            || matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        match letter {
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            _ if hidden => shown.extend(letter.escape_unicode()),
            _ => shown.push(letter),
        }
    }
    shown
}

/// Returns what becomes of a text: a program gets it as it is, a terminal would
/// obey it.
pub(crate) fn shown_in(terminal: bool) -> fn(String) -> String {
    match terminal {
        true => |text| visible(&text),
        false => |text| text,
    }
}

/// Does the same to each line of a text that is meant to have several.
pub(crate) fn visible_lines(text: &str) -> String {
    text.split('\n').map(visible).collect::<Vec<_>>().join("\n")
}
