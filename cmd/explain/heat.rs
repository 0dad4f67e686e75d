//! Advantages as colours, or as marks where there are none.

use comfy_table::{Attribute, Cell, Color};

use super::story::Token;
use crate::visible::visible;

/// The sign of an advantage, and its strength from 1 to 3 among those of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tint {
    positive: bool,
    strength: usize,
}

/// Returns the tints of an answer's tokens. Masked tokens and advantages of 0 have
/// none.
pub(super) fn tints(tokens: &[Token]) -> Vec<Option<Tint>> {
    let used = |token: &Token| token.advantage.filter(|_| token.mask == Some(1));
    let largest = tokens.iter().filter_map(used).fold(0.0_f32, |most, it| most.max(it.abs()));
    let tint = |token: &Token| {
        let advantage = used(token).filter(|advantage| *advantage != 0.0)?;
        // A third of the largest is weak, two thirds are middling.
        let strength = match advantage.abs() / largest {
            part if part <= 1.0 / 3.0 => 1,
            part if part <= 2.0 / 3.0 => 2,
            _ => 3,
        };
        Some(Tint { positive: advantage > 0.0, strength })
    };
    tokens.iter().map(tint).collect()
}

impl Tint {
    /// Returns the marks for pages without colours.
    pub(super) fn marks(self) -> String {
        if self.positive { "+" } else { "-" }.repeat(self.strength)
    }

    /// Colours a cell.
    pub(super) fn on(self, cell: Cell) -> Cell {
        let cell = cell.fg(if self.positive { Color::DarkGreen } else { Color::DarkRed });
        match self.strength {
            1 => cell.add_attribute(Attribute::Dim),
            2 => cell,
            _ => cell.add_attribute(Attribute::Bold),
        }
    }

    fn escape(self) -> &'static str {
        match (self.positive, self.strength) {
            (true, 1) => "\u{1b}[2;32m",
            (true, 2) => "\u{1b}[32m",
            (true, _) => "\u{1b}[1;32m",
            (false, 1) => "\u{1b}[2;31m",
            (false, 2) => "\u{1b}[31m",
            (false, _) => "\u{1b}[1;31m",
        }
    }
}

/// Writes the answer token by token, each in its tint, in lines of a width. Tokens
/// without a text stand as ids.
pub(super) fn lines(tokens: &[Token], colored: bool, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for (token, tint) in tokens.iter().zip(tints(tokens)) {
        let text = match &token.text {
            Some(text) => visible(text),
            None => format!("{} ", token.id),
        };
        let text = match tint {
            Some(tint) if !colored => format!("{}[{}]", text.trim_end(), tint.marks()),
            _ => text,
        };
        let text =
            if token.text.is_none() && !colored { format!("{} ", text.trim_end()) } else { text };
        let columns = columns(&text);
        if used > 0 && used + columns > width {
            lines.push(String::new());
            used = 0;
        }
        used += columns;
        if let Some(line) = lines.last_mut() {
            match tint.filter(|_| colored) {
                Some(tint) => line.push_str(&format!("{}{text}\u{1b}[0m", tint.escape())),
                None => line.push_str(&text),
            }
        }
    }
    lines
}

/// Counts the columns of a text on a terminal, wide letters as two.
fn columns(text: &str) -> usize {
    let wide = |letter: char| {
        matches!(u32::from(letter),
            0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff
            | 0xfe30..=0xfe6f | 0xff00..=0xff60 | 0x1f300..=0x1faff | 0x20000..=0x3fffd)
    };
    text.chars().map(|letter| 1 + usize::from(wide(letter))).sum()
}
