//! What `replay --save` writes: rows as `serve` would have recorded them.

use oclaw::table::read_turns;
use oclaw::trajectory::words::{LogProbKind, TokenSource, WeightVersionSource};

use super::*;
use crate::harness::fake_engine::{FakeEngine, Reply};

const CHAT: &str = "/v1/chat/completions";

/// SGLang's answer of two ids, of which the server counts so many.
fn sampled(counted: u32) -> Reply {
    let entries = [3, 4]
        .map(|id| json!({"token": format!("token_id:{id}"), "token_id": id, "logprob": -0.5}));
    let choice = json!({
        "index": 0, "message": message("assistant", "1"), "finish_reason": "stop",
        "matched_stop": 4, "prompt_token_ids": [1, 2], "response_token_ids": [3, 4],
        "logprobs": {"content": entries},
    });
    let usage = json!({"prompt_tokens": 2, "completion_tokens": counted});
    let metadata = json!({"weight_version": "5"});
    Reply::json(200, json!({"choices": [choice], "usage": usage, "metadata": metadata}))
}

fn saved(folder: &Path) -> Vec<Turn> {
    read_turns(&[folder.join("new.parquet")]).unwrap()
}

#[test]
fn an_untrainable_answer_stays_one() {
    let folder = tempfile::tempdir().unwrap();
    record(folder.path(), &[turn("a", 1, &[message("user", "one")], "1")]);
    let fake = FakeEngine::sglang();
    let url = format!("sglang+{}", fake.url());
    let arguments = ["--engine", &url, "--by", "rules", "--save", "new.parquet"];
    let before = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_micros()).unwrap();
    for (counted, reason) in [(2, None), (3, Some("usage_mismatch"))] {
        fake.on(CHAT, [sampled(counted)]);
        let further = ["--temperature", "0.5", "--sampling-seed", "9", "--max-tokens", "7"];
        replay(folder.path(), &[&arguments[..], &further].concat()).success();
        let rows = saved(folder.path());
        let [row] = &rows[..] else { panic!("one row") };
        assert_eq!(row.untrainable_reason.as_deref(), reason);
        assert_eq!(row.usage_completion_tokens, Some(counted));
        assert_eq!(row.response_ids.as_deref(), Some(&[3, 4][..]));
        assert_eq!(row.token_source, TokenSource::Engine);
        assert_eq!(
            (row.matched_stop.as_deref(), row.ends_with_stop_token),
            (Some("4"), Some(true))
        );
        // What was asked, by whom it was answered, and when.
        let sampling = &row.sampling;
        assert_eq!((sampling.temperature, sampling.seed), (Some(0.5), Some(9)));
        assert_eq!((sampling.max_tokens, sampling.log_prob_kind), (Some(7), LogProbKind::Tempered));
        assert!(before <= row.created_at.0 && row.created_at.0 <= row.finished_at.0);
        assert_ne!(row.model, "tiny");
        assert_eq!(row.weight_version.as_deref(), Some("5"));
        assert_eq!(row.weight_version_source, WeightVersionSource::Answer);
    }
    // What the server did not tell is not known.
    let url = scripted(counts);
    replay(folder.path(), &["--engine", &url, "--save", "new.parquet"]).success();
    let rows = saved(folder.path());
    let [row] = &rows[..] else { panic!("one row") };
    assert_eq!(row.untrainable_reason.as_deref(), Some("no_token_ids"));
    assert_eq!((row.response_ids.as_ref(), row.token_source), (None, TokenSource::None));
    assert_eq!((row.sampling.log_prob_kind, &*row.model), (LogProbKind::Unknown, "scripted"));
    assert_eq!((&row.weight_version, row.ends_with_stop_token), (&None, None));
}

#[test]
fn a_rebuilt_conversation_is_saved_as_it_was_sent() {
    fn counts_in_words(body: &Value) -> (StatusCode, Value) {
        match body["messages"].as_array().unwrap().len() {
            1 => says("one", "stop"),
            _ => says("2", "stop"),
        }
    }
    let folder = tempfile::tempdir().unwrap();
    two_sessions(folder.path());
    let url = scripted(counts_in_words);
    for (history, said) in [("fixed", "1"), ("on-policy", "one")] {
        let arguments = ["--engine", &url, "--history", history, "--save", "new.parquet"];
        replay(folder.path(), &arguments).code(3);
        let turns = saved(folder.path());
        let second = turns.iter().find(|turn| turn.session_id == "a" && turn.turn == 2).unwrap();
        let messages: Value = serde_json::from_str(&second.messages).unwrap();
        assert_eq!(messages[1]["content"], said);
        // The same answer, but to another conversation: what came next came of that.
        assert_eq!(second.next_state.is_some(), history == "fixed");
    }
}
