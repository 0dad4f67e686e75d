//! The documented reading of a judge's reply, written a second time and as
//! plainly as can be: a golden case is held against this where the reference reads
//! otherwise on purpose (algorithms.md 2: boxes inside thinking or quoted input
//! never count; the same goes for hints).

use oclaw::template::strip;

const TAGS: [&str; 4] = ["think", "thinking", "thought", "reasoning"];

/// Zeros of some scripts; each is followed by its other nine digits.
const ZEROS: [u32; 8] = [0x30, 0x660, 0x6f0, 0x966, 0x9e6, 0xe50, 0xff10, 0x1d7ce];

/// Whether the two readings may differ.
pub(super) fn differs(text: &str) -> bool {
    let tagged = TAGS
        .iter()
        .any(|tag| text.contains(&format!("<{tag}>")) || text.contains(&format!("</{tag}>")));
    tagged || text.lines().any(|line| line.trim_start().starts_with('>'))
}

/// Leaves out what stands between a tag and its end, before an end alone, and
/// after a beginning alone.
fn without_thinking(text: &str) -> String {
    let mut text = text.to_owned();
    let next = |text: &str, form: fn(&str) -> String| {
        let found = TAGS.iter().filter_map(|tag| Some((text.find(&form(tag))?, form(tag), *tag)));
        found.min_by_key(|(at, ..)| *at)
    };
    let opening = |tag: &str| format!("<{tag}>");
    let closing = |tag: &str| format!("</{tag}>");
    let mut from = 0;
    while let Some((at, mark, _)) = next(&text[from..], opening) {
        let (start, inside) = (from + at, from + at + mark.len());
        let end = TAGS.iter().filter_map(|tag| {
            let end = closing(tag);
            Some(inside + text[inside..].find(&end)? + end.len())
        });
        match end.min() {
            Some(end) => text.replace_range(start..end, ""),
            None => from = inside,
        }
    }
    while let Some((at, mark, _)) = next(&text, closing) {
        text.replace_range(..at + mark.len(), "");
    }
    if let Some((at, ..)) = next(&text, opening) {
        text.truncate(at);
    }
    text
}

fn digit(letter: char) -> Option<i64> {
    let code = u32::from(letter);
    let zero = ZEROS.into_iter().find(|zero| (*zero..zero + 10).contains(&code))?;
    Some(i64::from(code - zero))
}

/// The number in the last well-formed box, whatever it is.
fn last_box(text: &str) -> Option<i64> {
    let lines: Vec<&str> =
        text.lines().filter(|line| !line.trim_start().starts_with('>')).collect();
    let mut last = None;
    for line in lines {
        for (at, mark) in line.match_indices("\\boxed{") {
            let rest = &line[at + mark.len()..];
            let (sign, rest) = match rest.chars().next() {
                Some('-') => (-1, &rest[1..]),
                Some('+') => (1, &rest[1..]),
                _ => (1, rest),
            };
            let mut letters = rest.chars();
            if let (Some(digit), Some('}')) = (letters.next().and_then(digit), letters.next()) {
                last = Some(sign * digit);
            }
        }
    }
    last
}

/// The vote of a judge: -1, 0, 1 or none.
pub(super) fn vote(text: &str) -> Option<i64> {
    last_box(&without_thinking(text)).filter(|vote| (-1..=1).contains(vote))
}

/// The vote on a hint, 1, -1 or none, and the hint.
pub(super) fn hint(text: &str) -> (Option<i64>, String) {
    const OPEN: &str = "[HINT_START]";
    const CLOSE: &str = "[HINT_END]";
    let final_text = without_thinking(text);
    let (mut rest, mut hint) = (final_text.as_str(), "");
    while let Some(start) = rest.find(OPEN) {
        let inside = &rest[start + OPEN.len()..];
        let Some(end) = inside.find(CLOSE) else { break };
        hint = &inside[..end];
        rest = &inside[end + CLOSE.len()..];
    }
    (vote(text).filter(|vote| *vote != 0), strip(hint).to_owned())
}

#[test]
fn golden_thinking_and_quotes_do_not_count() {
    let cases: [(&str, Option<i64>); 12] = [
        ("<think>\\boxed{1}</think>\\boxed{-1}", Some(-1)),
        ("\\boxed{1} <think>\\boxed{-1}</think>", Some(1)),
        ("\\boxed{1}</think> nothing", None),
        ("\\boxed{1} <think>\\boxed{-1}", Some(1)),
        ("<think>a</think>\\boxed{1}<think>\\boxed{-1}</think>", Some(1)),
        ("<reasoning>\\boxed{0}</reasoning>", None),
        ("> \\boxed{1}\n\\boxed{0}", Some(0)),
        ("\\boxed{1}\n > \\boxed{-1}", Some(1)),
        ("\\boxed{2}", None),
        ("\\boxed{٠}", Some(0)),
        ("\\boxed{1} \\boxed{x}", Some(1)),
        ("", None),
    ];
    for (text, expected) in cases {
        assert_eq!(vote(text), expected, "{text}");
        let reply = oclaw::judge::Reply { text: text.to_owned(), finish_reason: None };
        assert_eq!(oclaw::judge::read(&reply).ok().map(i64::from), expected, "{text}");
    }
    let text =
        "<think>[HINT_START]not this one[HINT_END]</think>\\boxed{1}[HINT_START] this [HINT_END]";
    assert_eq!(hint(text), (Some(1), "this".to_owned()));
    let found = oclaw::hint::parse(text);
    assert_eq!((found.vote.map(i64::from), found.hint), (Some(1), "this".to_owned()));
}
