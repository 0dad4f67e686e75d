//! A judge's answer: a vote is -1, 0 or 1 or there is none, and nothing that a turn
//! quotes becomes one.

use oclaw::judge::{self, Reply};

/// The first byte says how the answer ended.
pub(crate) fn run(bytes: &[u8]) {
    let Some((first, text)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(text).into_owned();
    let endings = [None, Some("stop"), Some("length"), Some("abort")];
    let finish_reason = endings[usize::from(*first) % endings.len()].map(str::to_owned);
    let reply = Reply { text: text.clone(), finish_reason };
    let vote = judge::read(&reply).ok();
    assert!(vote.is_none_or(|vote| (-1..=1).contains(&vote)));
    let verdict = judge::verdict(vec![Ok(reply)]);
    assert_eq!(verdict.votes, [vote]);
    assert_eq!(verdict.score(), vote);
    // As a part of a prompt the same text is no verdict.
    let quoted = judge::quote(&text, 200);
    assert_eq!(judge::last_box(&quoted), None, "{quoted:?}");
}
