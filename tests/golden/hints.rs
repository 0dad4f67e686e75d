//! From the calls of a judge to hints, to texts for the teacher, to the signals
//! of a row: the `hint_cases` of the hybrid set.
//!
//! Deliberate differences, each by a rule:
//! * At most three hints are kept, whatever the recorded limit; below it the
//!   list is cut further here, above it the first three are compared.
//! * No valid vote is no score; the reference says 0. Neither is a signal.
//! * A turn without a hint has no candidate; the reference gives it one, its own
//!   prompt. It is of kind `rl`.
//! * A list of server log-probs of the wrong length refuses the row by name; it
//!   is not padded, cut or passed on.

use oclaw::advantage::resolve;
use oclaw::hint::{self, Keep};
use oclaw::judge::{self, Fault, Reply};
use oclaw::template::enhanced_messages;
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::SampleKind;
use serde_json::{Value, json};

use crate::forge::captured;
use crate::harness::{golden_json, list, skip};

use super::plain;

/// Our limit on hints.
const MOST: usize = 3;

#[test]
fn golden_hint_cases() {
    let Some(file) = golden_json("hybrid/cases.json") else { return };
    for case in list(&file, "hint_cases") {
        let (input, output) = (&case["input"], &case["output"]);
        match case["fn"].as_str().unwrap() {
            "prepare_hints" => prepare_hints(input, output),
            "prepare_hints_from_judge_text" => prepare_from_text(input, output),
            "dispatch" => dispatch(input, output),
            other => skip(&format!("unknown function {other}")),
        }
    }
}

/// Selects among votes as the reference writes them.
fn selected(votes: &Value) -> Vec<String> {
    let one = |score: &Value| score.as_f64() == Some(1.0) || score == &json!(true);
    let votes = votes.as_array().unwrap().iter();
    let accepted =
        votes.filter(|vote| one(&vote["score"])).filter_map(|vote| vote["hint"].as_str());
    hint::select(accepted, Keep::All, usize::MAX)
}

fn check(mut hints: Vec<String>, input: &Value, output: &Value) {
    let limit = input["max_candidates"].as_u64().unwrap_or(3).max(1) as usize;
    hints.truncate(limit);
    let first = |list: &Value| -> Vec<String> {
        let list = list.as_array().into_iter().flatten().take(MOST);
        list.map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(hints, first(&output["hints"]), "{input}");
    assert_eq!(output["accepted"], !hints.is_empty(), "{input}");
    let response = input["response_text"].as_str().unwrap();
    let texts: Vec<_> =
        hints.iter().map(|hint| rendered(&input["messages"], hint, response)).collect();
    assert_eq!(texts, first(&output["candidate_texts"]), "{input}");
}

/// The recorder's own template.
fn rendered(messages: &Value, hint: &str, response: &str) -> String {
    let messages = enhanced_messages(messages.as_array().unwrap(), hint).unwrap();
    let text = |message: &Value| {
        format!("<{}>{}\n", message["role"].as_str().unwrap(), message["content"].as_str().unwrap())
    };
    let prompt: String = messages.iter().map(text).collect();
    format!("{prompt}<assistant>{response}")
}

fn prepare_hints(input: &Value, output: &Value) {
    check(selected(&input["votes"]), input, output);
}

/// The recorded cases have no thinking and no quotes.
#[test]
fn golden_hints_of_thinking_are_none() {
    let input = json!({"replies": [
        "<think>[HINT_START]Not this one.[HINT_END]\\boxed{-1}</think>\\boxed{1}[HINT_START]Say it in a line.[HINT_END]",
        "\\boxed{-1}\n> \\boxed{1}[HINT_START]Only quoted.[HINT_END]",
        "<think>\\boxed{1}</think>",
        "__raise__",
    ]});
    let found = gathered(&input);
    assert_eq!(found.votes, Some(vec![Some(1), Some(-1), None, None]));
    assert_eq!(found.hints, Some(vec!["Say it in a line.".to_owned()]));
    // Held against the plain reading too, as a recorded case would be.
    prepare_from_text(&input, &Value::Null);
}

fn gathered(input: &Value) -> hint::Found {
    let replies = input["replies"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    let reply = |text: &str| match text {
        "__raise__" => Err(Fault::failed("refused")),
        text => Ok(Reply { text: text.to_owned(), finish_reason: Some("stop".to_owned()) }),
    };
    hint::gather(replies.map(reply).collect(), Keep::All, usize::MAX)
}

fn prepare_from_text(input: &Value, output: &Value) {
    let found = gathered(input);
    // Thinking and quotes are read otherwise on purpose: the plain reading tells.
    let texts = || input["replies"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    if texts().any(plain::differs) {
        let read: Vec<_> = texts().filter(|text| *text != "__raise__").map(plain::hint).collect();
        let votes: Vec<_> = found.votes.iter().flatten().flatten().map(|v| i64::from(*v)).collect();
        assert_eq!(votes, read.iter().filter_map(|(vote, _)| *vote).collect::<Vec<_>>(), "{input}");
        let one = read.iter().filter(|(vote, _)| *vote == Some(1)).map(|(_, hint)| hint.as_str());
        let wanted = hint::select(one, Keep::All, usize::MAX);
        assert_eq!(found.hints.unwrap_or_default(), wanted, "{input}");
        return;
    }
    let wanted = output["votes"].as_array().unwrap().iter().map(|vote| vote[0].as_i64());
    let votes = found.votes.clone().unwrap().into_iter().map(|vote| vote.map(i64::from));
    assert!(votes.eq(wanted), "{input}: {:?}", found.votes);
    check(found.hints.unwrap_or_default(), input, output);
}

/// What the loop makes of both questions about one turn.
fn dispatch(input: &Value, output: &Value) {
    let hints = selected(&input["votes"]);
    let evals = input["eval_votes"].as_array();
    let votes: Option<Vec<_>> =
        evals.map(|votes| votes.iter().map(|vote| vote.as_i64().map(|vote| vote as i8)).collect());
    let score = votes.as_deref().and_then(judge::majority).map(f32::from);
    let recorded = &input["turn"];
    let ids = |key: &str| {
        let ids = recorded[key].as_array().unwrap().iter();
        ids.map(|id| id.as_i64().unwrap() as i32).collect::<Vec<_>>()
    };
    let log_probs = recorded["response_logprobs"].as_array().unwrap().iter();
    let log_probs: Vec<_> = log_probs.map(|value| value.as_f64().map(|x| x as f32)).collect();
    let tokens = ids("response_ids").len();
    let fits = log_probs.len() == tokens;
    let turn = Turn {
        prompt_ids: Some(ids("prompt_ids")),
        response_ids: Some(ids("response_ids")),
        rollout_log_probs: Some(log_probs),
        score,
        votes,
        teacher_log_probs: (!hints.is_empty()).then(|| vec![Some(vec![-1.0; tokens]); hints.len()]),
        hints: (!hints.is_empty()).then(|| hints.clone()),
        ..captured("s", 1)
    };
    // No valid vote is 0 there.
    assert_eq!(score.unwrap_or(0.0), output["eval_score"].as_f64().unwrap_or(0.0) as f32);
    let Ok(signals) = resolve(&turn) else {
        assert!(!fits, "{input}");
        return;
    };
    assert!(fits, "{input}");
    let sample = &output["sample"];
    let reward = sample["reward"]["score"].as_f64();
    let kind = match (sample.is_null(), hints.is_empty(), reward == Some(0.0)) {
        (true, ..) => SampleKind::None,
        (_, true, _) => SampleKind::Rl,
        (_, false, true) => SampleKind::Opd,
        (_, false, false) => SampleKind::OpdRl,
    };
    assert_eq!(signals.kind, kind, "{input}");
    if sample.is_null() {
        return;
    }
    assert_eq!(signals.reward.unwrap_or(0.0), reward.unwrap() as f32, "{input}");
    let mask: Vec<_> = sample["loss_mask"].as_array().unwrap().iter().map(|m| m == 1).collect();
    assert_eq!(signals.mask.unwrap(), mask.into_iter().map(i8::from).collect::<Vec<_>>());
    match hints.is_empty() {
        true => assert_eq!(sample["candidates_are_plain_tokens"], json!([true]), "{input}"),
        false => {
            assert_eq!(sample["n_candidates"], hints.len(), "{input}");
            let response = recorded["response_text"].as_str().unwrap();
            let texts: Vec<_> =
                hints.iter().map(|hint| rendered(&recorded["messages"], hint, response)).collect();
            assert_eq!(sample["candidate_texts"], json!(texts), "{input}");
        }
    }
}
