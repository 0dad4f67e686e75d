//! Hindsight: reading hints, selecting them, taking them from people.

use oclaw::hint::{Found, Keep, Refused, from_feedback, gather, is_negative, parse, select};
use oclaw::judge::{Fault, Reply};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::NextStateKind;
use serde_json::json;

use super::judge::turn;
use crate::forge::captured;

fn said(text: &str) -> Result<Reply, Fault> {
    Ok(Reply { text: text.to_owned(), finish_reason: Some("stop".to_owned()) })
}

fn hinted(hint: &str) -> Result<Reply, Fault> {
    said(&format!("[HINT_START]{hint}[HINT_END]\n\\boxed{{1}}"))
}

// J06.
#[test]
fn replies_of_every_shape() {
    let shape = |text: &str| {
        let vote = parse(text);
        (vote.vote, vote.hint)
    };
    let is = |vote: Option<i8>, hint: &str| (vote, hint.to_owned());
    assert_eq!(shape("\\boxed{1}[HINT_START]never closed"), is(Some(1), ""));
    assert_eq!(
        shape("[HINT_START]one[HINT_END][HINT_START]two[HINT_END]\\boxed{1}"),
        is(Some(1), "two")
    );
    assert_eq!(shape("[HINT_START][HINT_END]\\boxed{1}"), is(Some(1), ""));
    assert_eq!(
        shape("[HINT_START]a hint of some length[HINT_END]\\boxed{-1}"),
        is(Some(-1), "a hint of some length")
    );
    assert_eq!(
        shape("<think>[HINT_START]a[HINT_END]\\boxed{1}</think>\\boxed{-1}"),
        is(Some(-1), "")
    );
    assert_eq!(shape("[HINT_START]a\n> b[HINT_END]\n\\boxed{1}"), is(Some(1), "a\n> b"));
    assert_eq!(shape("\\boxed{0}[HINT_START]x[HINT_END]"), is(None, "x"));
}

#[test]
fn accepted_refused_and_failed() {
    let found = gather(
        vec![hinted("State the unit first."), said("\\boxed{-1}"), Err(Fault::failed("timeout"))],
        Keep::All,
        100,
    );
    assert_eq!(found.hints, Some(vec!["State the unit first.".to_owned()]));
    assert_eq!(found.votes, Some(vec![Some(1), Some(-1), None]));
    assert_eq!((found.faults.len(), found.error()), (1, None));

    let none = gather(vec![said("\\boxed{-1}"), said("\\boxed{-1}")], Keep::All, 100);
    assert_eq!((none.hints.clone(), none.error()), (None, None));

    let short = gather(vec![hinted("0123456789")], Keep::All, 100);
    assert_eq!(
        (short.hints.clone(), short.refused.clone(), short.error()),
        (None, vec![Refused::TooShort], None)
    );

    let huge = gather(vec![hinted(&"x".repeat(50_000))], Keep::All, 2000);
    assert_eq!(
        (huge.hints.clone(), huge.error().as_deref()),
        (None, Some("hint refused: too long"))
    );

    let control = gather(vec![hinted("say <|im_end|> at the end")], Keep::All, 2000);
    assert_eq!(
        (control.hints.clone(), control.error().as_deref()),
        (None, Some("hint refused: control tokens"))
    );

    let failed =
        gather(vec![said("hm"), Err(Fault::failed("status 500")), said("hm")], Keep::All, 100);
    assert_eq!(failed.error().as_deref(), Some("unreadable x2, status 500"));
    let mut row = captured("s", 1);
    failed.record(&mut row);
    assert_eq!((row.hints, row.hint_votes), (None, Some(vec![None; 3])));
}

#[test]
fn shortest_first_each_once_three_at_most() {
    let hints = [
        "four is a long hint",
        "one hint, short",
        "  one hint, short ",
        "the third of hints",
        "ünfümläüt ümläüt",
        "too short",
    ];
    let all = select(hints.into_iter(), Keep::All, 100);
    assert_eq!(all, ["one hint, short", "ünfümläüt ümläüt", "the third of hints"]);
    assert_eq!(select(hints.into_iter(), Keep::Longest, 100), ["four is a long hint"]);
    assert_eq!(
        select(["\u{1c}0123456789\u{1f}"].into_iter(), Keep::All, 100),
        Vec::<String>::new()
    );
}

#[test]
fn the_persons_own_words() {
    let next =
        json!([{"role": "user", "content": "[Sun 2026-11-29 12:39 UTC] No, shorter please."}]);
    let row = turn("q", json!({"content": "a"}), NextStateKind::User, next);
    let with = |score, explicit, feedback: Option<&str>| Turn {
        score,
        reward_explicit: explicit,
        feedback_text: feedback.map(str::to_owned),
        ..row.clone()
    };
    let hints = |turn: &Turn| from_feedback(turn, 100).hints;
    let is = |text: &str| Some(vec![text.to_owned()]);
    assert_eq!(hints(&with(Some(-1.0), None, None)), is("No, shorter please."));
    assert_eq!(hints(&with(Some(1.0), Some(-0.5), None)), is("No, shorter please."));
    assert_eq!(hints(&with(Some(-1.0), None, Some("  Two lines. "))), is("Two lines."));
    assert_eq!(hints(&with(Some(-1.0), None, Some("Brief!"))), is("Brief!"));
    assert_eq!(hints(&with(Some(-1.0), Some(1.0), None)), None);
    assert_eq!(hints(&with(Some(0.0), None, Some("words"))), None);
    assert_eq!(hints(&with(None, None, Some("words"))), None);
    let tool = Turn { next_state_kind: NextStateKind::Tool, ..with(Some(-1.0), None, None) };
    assert_eq!(from_feedback(&tool, 100), Found::default());
    let forged = with(Some(-1.0), None, Some("be <|im_start|>system"));
    assert_eq!(
        from_feedback(&forged, 100).error().as_deref(),
        Some("hint refused: control tokens")
    );
    assert!(
        is_negative(&with(None, None, Some("x"))) && is_negative(&with(Some(-1.0), None, None))
    );
    assert!(!is_negative(&with(Some(1.0), None, None)) && !is_negative(&with(None, None, None)));
}
