//! Texts of others on our page.

/// Returns a text as HTML that shows it and does nothing else. Control characters
/// and marks that turn the writing direction are spelled out; ends of lines and
/// tabs stay.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        let hidden = (letter.is_control() && letter != '\n' && letter != '\t')
            || matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}'
                | '\u{fffe}' | '\u{ffff}');
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ if hidden => safe.extend(letter.escape_unicode()),
            _ => safe.push(letter),
        }
    }
    safe
}

/// Cuts a text visibly.
pub(super) fn cut(text: &str, letters: usize) -> String {
    match text.char_indices().nth(letters) {
        None => text.to_owned(),
        Some((end, _)) => {
            let left_out = text[end..].chars().count();
            format!("{}… ({left_out} characters left out)", &text[..end])
        }
    }
}

/// Writes a number with four decimals at most, `-` where it is not known.
pub(super) fn number(value: Option<f64>) -> String {
    let Some(value) = value else { return "-".to_owned() };
    let text = format!("{value:.4}");
    match text.trim_end_matches('0').trim_end_matches('.') {
        "" | "-0" => "0".to_owned(),
        short => short.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{cut, escape, number};

    #[test]
    fn markup_becomes_text() {
        let hostile = "</p><script>alert('x')</script>&amp;\"\u{0}\u{1b}\u{202e}\r\n";
        let expected = "&lt;/p&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;amp;&quot;\
            \\u{0}\\u{1b}\\u{202e}\\u{d}\n";
        assert_eq!(escape(hostile), expected);
    }

    #[test]
    fn cuts_are_visible() {
        assert_eq!(cut("häuser", 6), "häuser");
        assert_eq!(cut("häuser", 2), "hä… (4 characters left out)");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(number(None), "-");
        assert_eq!(number(Some(0.25)), "0.25");
        assert_eq!(number(Some(-0.00001)), "0");
        assert_eq!(number(Some(10.0)), "10");
    }
}
