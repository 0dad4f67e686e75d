//! Answers with hints: what is taken is within its size, and what could be a control
//! token of a model is not.

use oclaw::hint::{self, Keep};
use oclaw::judge::Reply;

const MOST_CHARS: usize = 120;
const CONTROL: [&str; 6] =
    ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "</s>", "[INST]", "<｜end▁of▁sentence｜>"];

/// The answers stand between zero bytes.
pub(crate) fn run(bytes: &[u8]) {
    let reply = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).into_owned();
        Ok(Reply { text, finish_reason: Some("stop".to_owned()) })
    };
    for keep in [Keep::All, Keep::Longest] {
        let replies: Vec<_> = bytes.split(|byte| *byte == 0).take(5).map(reply).collect();
        let calls = replies.len();
        let found = hint::gather(replies, keep, MOST_CHARS);
        assert_eq!(found.votes.map(|votes| votes.len()), Some(calls));
        let hints = found.hints.unwrap_or_default();
        assert!(hints.len() <= 3);
        for (place, hint) in hints.iter().enumerate() {
            let characters = hint.chars().count();
            assert!((11..=MOST_CHARS).contains(&characters), "{characters}: {hint:?}");
            assert!(!CONTROL.iter().any(|token| hint.contains(token)), "{hint:?}");
            assert!(!hints[..place].contains(hint), "twice: {hint:?}");
        }
    }
}
