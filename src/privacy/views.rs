//! A text as the program reads it that it is meant for: without the escapes of
//! JSON, of URLs and of HTML, wide letters narrow, invisible ones left out. Each
//! letter knows where it stood.

use std::ops::Range;

/// A text decoded once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    pub(super) text: String,
    /// Where what a byte stands for begins and ends in the text before.
    origins: Vec<(usize, usize)>,
}

impl View {
    /// Decodes one level of escapes. `None` if there is none.
    pub(super) fn of(text: &str) -> Option<Self> {
        let telling = |byte: u8| matches!(byte, b'\\' | b'%' | b'&') || !byte.is_ascii();
        if !text.bytes().any(telling) {
            return None;
        }
        let mut view = Self { text: String::with_capacity(text.len()), origins: Vec::new() };
        let mut changed = false;
        let mut at = 0;
        while let Some(letter) = text[at..].chars().next() {
            let (stands_for, length) = match decoded(&text[at..], letter) {
                Some(decoded) => {
                    changed = true;
                    decoded
                }
                None => (Some(letter), letter.len_utf8()),
            };
            if let Some(letter) = stands_for {
                view.text.push(letter);
                view.origins.extend(std::iter::repeat_n((at, at + length), letter.len_utf8()));
            }
            at += length;
        }
        changed.then_some(view)
    }

    /// Returns where a part of this text stood.
    pub(super) fn origin(&self, part: Range<usize>) -> Range<usize> {
        match (self.origins.get(part.start), part.end.checked_sub(1)) {
            (Some((start, _)), Some(last)) if part.end > part.start => {
                *start..self.origins.get(last).map_or(*start, |(_, end)| *end)
            }
            _ => 0..0,
        }
    }

    /// Returns the end of the escape that a place lies within.
    pub(super) fn end_of_escape(&self, at: usize) -> Option<usize> {
        let before = self.origins.partition_point(|(start, _)| *start < at).checked_sub(1)?;
        let (_, end) = self.origins[before];
        (at < end).then_some(end)
    }
}

/// Returns what a text begins with, if that is another spelling: the letter, or
/// nothing for an invisible one, and the length of the spelling.
fn decoded(text: &str, letter: char) -> Option<(Option<char>, usize)> {
    match letter {
        '\\' => escape(text).map(|(letter, length)| (Some(letter), length)),
        '%' => {
            let letter = char::from(u8::try_from(hex(text.get(1..3)?)?).ok()?);
            (letter.is_ascii() && !letter.is_ascii_control()).then_some((Some(letter), 3))
        }
        '&' => entity(text).map(|(letter, length)| (Some(letter), length)),
        '\u{ad}' | '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}' => {
            Some((None, letter.len_utf8()))
        }
        '\u{ff01}'..='\u{ff5e}' => {
            Some((char::from_u32(u32::from(letter) - 0xfee0), letter.len_utf8()))
        }
        '\u{fe6b}' => Some((Some('@'), letter.len_utf8())),
        '\u{fe52}' => Some((Some('.'), letter.len_utf8())),
        _ => None,
    }
}

fn hex(digits: &str) -> Option<u32> {
    let all = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

/// Reads an escape of JSON, or `\x40` as other languages write it.
fn escape(text: &str) -> Option<(char, usize)> {
    let simple = |letter: char| Some((letter, 2));
    match text.as_bytes().get(1)? {
        b'n' => simple('\n'),
        b'r' => simple('\r'),
        b't' => simple('\t'),
        b'b' => simple('\u{8}'),
        b'f' => simple('\u{c}'),
        byte @ (b'"' | b'\'' | b'\\' | b'/') => simple(char::from(*byte)),
        b'x' => Some((char::from_u32(hex(text.get(2..4)?)?)?, 4)),
        b'u' => {
            let first = hex(text.get(2..6)?)?;
            let second = || match text.get(6..8)? {
                r"\u" => hex(text.get(8..12)?),
                _ => None,
            };
            match first {
                0xd800..=0xdbff => {
                    let low = second().filter(|low| (0xdc00..=0xdfff).contains(low))?;
                    let letter = 0x10000 + ((first - 0xd800) << 10) + (low - 0xdc00);
                    Some((char::from_u32(letter)?, 12))
                }
                _ => Some((char::from_u32(first)?, 6)),
            }
        }
        _ => None,
    }
}

/// Reads a reference of HTML to a letter that addresses and keys are made with.
fn entity(text: &str) -> Option<(char, usize)> {
    let end = text.bytes().take(12).position(|byte| byte == b';')?;
    let letter = match text.get(1..end)? {
        "commat" => '@',
        "period" => '.',
        "lowbar" => '_',
        "hyphen" | "dash" => '-',
        "plus" => '+',
        "colon" => ':',
        "equals" => '=',
        "sol" => '/',
        "amp" => '&',
        "quot" => '"',
        "apos" => '\'',
        "lt" => '<',
        "gt" => '>',
        "nbsp" => ' ',
        number => {
            let digits = number.strip_prefix('#')?;
            let code = match digits.strip_prefix(['x', 'X']) {
                Some(digits) => hex(digits)?,
                None => digits.parse().ok()?,
            };
            char::from_u32(code)?
        }
    };
    Some((letter, end + 1))
}

#[cfg(test)]
mod tests {
    use super::View;

    #[test]
    fn letters_know_where_they_stood() {
        let text = r"a\u00e9%40&#64;＠b";
        let view = View::of(text).unwrap();
        assert_eq!(view.text, "aé@@@b");
        assert_eq!(view.origin(0..1), 0..1);
        assert_eq!(&text[view.origin(1..3)], r"\u00e9");
        assert_eq!(&text[view.origin(3..5)], "%40&#64;");
        assert_eq!(&text[view.origin(5..7)], "＠b");
        assert_eq!((view.end_of_escape(1), view.end_of_escape(2)), (None, Some(7)));
    }

    #[test]
    fn what_is_no_escape_stays() {
        for text in
            ["100 % of it", "a & b; c &co;", r"\d+ \ud83d \u12", "häuser", "50%", "\\", "%4"]
        {
            assert_eq!(View::of(text), None, "{text}");
        }
        assert_eq!(View::of(r"\ud83d\ude00").unwrap().text, "😀");
        assert_eq!(View::of("a\u{200b}b").unwrap().text, "ab");
    }
}
