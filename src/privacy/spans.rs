//! Places in a text that a pattern finds, and the text without them.

use std::ops::Range;
use std::path::Path;

use regex::Regex;

use super::Error;
use super::views::View;

/// Longest name of a pattern.
const LONGEST: usize = 40;
/// Escapes are looked behind so many levels deep.
const LEVELS: usize = 3;
const MARK: &str = "[redacted:";

/// What a match must be besides matching.
pub(super) type Check = fn(&str, Range<usize>) -> Option<Range<usize>>;

/// Something to find.
#[derive(Debug, Clone)]
pub struct Pattern {
    pub(super) name: String,
    regex: Regex,
    /// Narrows a match, or refuses it, by what stands in and around it.
    check: Check,
    /// Whether it is looked for in ids and names, too.
    pub(super) everywhere: bool,
}

impl Pattern {
    pub(super) fn new(
        name: &str,
        regex: &str,
        check: Check,
        everywhere: bool,
    ) -> Result<Self, Error> {
        let sound = !name.is_empty()
            && name.len() <= LONGEST
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        if !sound {
            let reason = "a name is made of letters, digits, `_` and `-`".to_owned();
            return Err(Error::Pattern { name: name.chars().take(LONGEST).collect(), reason });
        }
        let regex = Regex::new(regex).map_err(|error| Error::Pattern {
            name: name.to_owned(),
            // The parser's message shows the expression, which may be a secret.
            reason: match error {
                regex::Error::CompiledTooBig(_) => "the expression is too large".to_owned(),
                _ => "no regular expression".to_owned(),
            },
        })?;
        Ok(Self { name: name.to_owned(), regex, check, everywhere })
    }

    /// Makes a pattern of `NAME=REGEX`. If the expression has a group, what the
    /// first one matches is replaced, else the whole match.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let Some((name, regex)) = text.split_once('=') else {
            let reason = "wanted `NAME=REGEX`".to_owned();
            return Err(Error::Pattern { name: "?".to_owned(), reason });
        };
        Self::new(name.trim(), regex, |_, range| Some(range), true)
    }

    /// Reads patterns from TOML: a name and an expression per line.
    pub fn read(path: &Path) -> Result<Vec<Self>, Error> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::read(path, source))?;
        let failed =
            |reason: &str| Error::Patterns { path: path.to_owned(), reason: reason.to_owned() };
        let table: toml::Table = toml::from_str(&text).map_err(|_| failed("no TOML"))?;
        let mut found = Vec::new();
        for (name, value) in &table {
            let regex = value.as_str().ok_or_else(|| failed(&format!("`{name}` is no text")))?;
            found.push(Self::new(name, regex, |_, range| Some(range), true)?);
        }
        Ok(found)
    }

    fn spans<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
        self.regex.captures_iter(text).filter_map(move |found| {
            let whole = found.get(1).or_else(|| found.get(0))?;
            (self.check)(text, whole.range()).filter(|range| !range.is_empty())
        })
    }
}

/// A place to replace, and the index of its pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) range: Range<usize>,
    pub(super) pattern: usize,
}

/// Returns what patterns find in a text as it is and behind its escapes, in order.
/// Where two overlap, all of both goes, as the earlier pattern's.
pub(super) fn find(patterns: &[Pattern], text: &str, ids: bool) -> Vec<Span> {
    let mut found = at_every_level(patterns, text, ids, LEVELS);
    if found.is_empty() {
        return found;
    }
    let marks = marks(text);
    let marked = |span: &Span| {
        marks.iter().any(|mark| mark.start <= span.range.start && span.range.end <= mark.end)
    };
    found.retain(|span| !marked(span));
    found.sort_by_key(|span| (span.range.start, span.pattern));
    let mut merged: Vec<Span> = Vec::new();
    for span in found {
        match merged.last_mut() {
            Some(last) if span.range.start < last.range.end => {
                last.range.end = last.range.end.max(span.range.end);
                last.pattern = last.pattern.min(span.pattern);
            }
            _ => merged.push(span),
        }
    }
    merged
}

fn at_every_level(patterns: &[Pattern], text: &str, ids: bool, levels: usize) -> Vec<Span> {
    let mut found: Vec<Span> = Vec::new();
    for (index, pattern) in patterns.iter().enumerate() {
        if !ids || pattern.everywhere {
            found.extend(pattern.spans(text).map(|range| Span { range, pattern: index }));
        }
    }
    let Some(view) = (levels > 0).then(|| View::of(text)).flatten() else { return found };
    let mut behind = at_every_level(patterns, &view.text, ids, levels - 1);
    for span in &mut behind {
        span.range = view.origin(span.range.clone());
    }
    // In `\nbob@example.org` the first letter is the escape's, not the address's.
    for span in &mut found {
        let both =
            |other: &Span| other.range.start < span.range.end && span.range.start < other.range.end;
        let end = view.end_of_escape(span.range.start).filter(|end| *end < span.range.end);
        if let Some(end) = end.filter(|_| behind.iter().any(both)) {
            span.range.start = end;
        }
    }
    found.extend(behind);
    found
}

/// What an earlier run left in the place of others.
fn marks(text: &str) -> Vec<Range<usize>> {
    let starts = text.match_indices(MARK).map(|(start, _)| start);
    let mark = |start: usize| Some(start..start + text.get(start..)?.find(']')? + 1);
    starts.filter_map(mark).collect()
}

/// Returns a text with its spans replaced.
pub(super) fn replace(text: &str, spans: &[Span], mut by: impl FnMut(&Span) -> String) -> String {
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    for span in spans {
        out.push_str(&text[at..span.range.start]);
        out.push_str(&by(span));
        at = span.range.end;
    }
    out.push_str(&text[at..]);
    out
}

/// Returns the mark that stands for something.
pub(super) fn mark(name: &str, number: Option<usize>) -> String {
    match number {
        None => format!("{MARK}{name}]"),
        Some(number) => format!("{MARK}{name}#{number}]"),
    }
}
