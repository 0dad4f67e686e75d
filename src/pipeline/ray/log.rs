//! The text of a log out of a head's answer, `{"logs": "…"}`, as it comes: an answer
//! may be longer than what fits into memory.

/// What comes before the text, but for white space.
const HEAD: &[u8] = b"{\"logs\":\"";

/// Reads the text, piece by piece.
#[derive(Debug, Default)]
pub(super) struct Text {
    at: At,
    /// The first half of a character that JSON writes as two.
    high: Option<u32>,
}

/// Where in the answer the next byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// So many bytes of the head have come.
    Head(usize),
    Text,
    /// After a `\`.
    Escape,
    /// Within the four digits of `\u`, of which so many have come.
    Code(u32, u32),
    /// After the text, or where there is none.
    End,
    /// In what is no such answer.
    Foreign,
}

impl Default for At {
    fn default() -> Self {
        Self::Head(0)
    }
}

impl Text {
    /// Takes a piece of the answer, and returns what it has of the text.
    pub(super) fn read(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut text = Vec::with_capacity(piece.len());
        for byte in piece {
            self.at = self.step(*byte, &mut text);
        }
        text
    }

    /// Returns whether the text has come to its end.
    pub(super) fn is_whole(&self) -> bool {
        self.at == At::End
    }

    fn step(&mut self, byte: u8, text: &mut Vec<u8>) -> At {
        match self.at {
            At::Head(_) if byte.is_ascii_whitespace() => self.at,
            At::Head(come) => match HEAD.get(come) {
                Some(wanted) if *wanted != byte => match byte {
                    // `null`: there is no log yet.
                    b'n' if come + 1 == HEAD.len() => At::End,
                    _ => At::Foreign,
                },
                _ if come + 1 == HEAD.len() => At::Text,
                _ => At::Head(come + 1),
            },
            At::Text => match byte {
                b'\\' => At::Escape,
                b'"' => {
                    self.lone(text);
                    At::End
                }
                byte => {
                    self.lone(text);
                    text.push(byte);
                    At::Text
                }
            },
            At::Escape if byte == b'u' => At::Code(0, 0),
            At::Escape => {
                self.lone(text);
                text.push(match byte {
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'r' => b'\r',
                    b'b' => 8,
                    b'f' => 12,
                    byte => byte,
                });
                At::Text
            }
            At::Code(come, code) => match char::from(byte).to_digit(16) {
                None => At::Foreign,
                Some(digit) if come == 3 => {
                    self.coded(code * 16 + digit, text);
                    At::Text
                }
                Some(digit) => At::Code(come + 1, code * 16 + digit),
            },
            At::End | At::Foreign => self.at,
        }
    }

    /// Takes a character by its code, or half of one.
    fn coded(&mut self, code: u32, text: &mut Vec<u8>) {
        let code = match (self.high, code) {
            (Some(high), 0xdc00..=0xdfff) => {
                self.high = None;
                0x10000 + ((high - 0xd800) << 10) + (code - 0xdc00)
            }
            (_, 0xd800..=0xdbff) => {
                self.lone(text);
                self.high = Some(code);
                return;
            }
            _ => {
                self.lone(text);
                code
            }
        };
        push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), text);
    }

    /// Stands something in for a first half that had no second one.
    fn lone(&mut self, text: &mut Vec<u8>) {
        if self.high.take().is_some() {
            push(char::REPLACEMENT_CHARACTER, text);
        }
    }
}

fn push(character: char, text: &mut Vec<u8>) {
    text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> (String, bool) {
        let mut text = Text::default();
        let read: Vec<u8> = pieces.iter().flat_map(|piece| text.read(piece)).collect();
        (String::from_utf8(read).unwrap(), text.is_whole())
    }

    #[test]
    fn a_text_is_the_same_wherever_it_is_parted() {
        let said = "step 1\n\t\"ö\" \\ \u{8}\u{c}\r/ 🦀 \u{1}";
        let raw = serde_json::json!({"logs": said}).to_string();
        // As Python writes it.
        let ascii = raw.replace('ö', "\\u00f6").replace('🦀', "\\ud83e\\uDD80");
        let spaced = ascii.replacen(':', ": ", 1).replace('/', "\\/");
        for answer in [raw, ascii, spaced] {
            for at in 0..=answer.len() {
                let (one, other) = answer.as_bytes().split_at(at);
                assert_eq!(read(&[one, other]), (said.to_owned(), true), "{at}");
            }
        }
    }

    #[test]
    fn what_is_cut_or_foreign_is_not_whole() {
        assert_eq!(read(&[b"{\"logs\": \"on"]), ("on".to_owned(), false));
        assert_eq!(read(&[b"{\"logs\": null}"]), (String::new(), true));
        for foreign in [&b"<html>"[..], b"{\"log\": \"x\"}", b"{\"logs\": 7}", b""] {
            assert_eq!(read(&[foreign]), (String::new(), false));
        }
        // Halves of characters that are none.
        assert_eq!(
            read(&[b"{\"logs\":\"\\ud83ea\\udd80\\ud83e\"}"]).0,
            "\u{fffd}a\u{fffd}\u{fffd}"
        );
    }
}
