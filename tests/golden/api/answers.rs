//! What a judge is shown of an answer, and the log-probs that are read from one.

use oclaw::capture::{Dialect, prepare, read_answer};
use oclaw::hint;
use oclaw::judge::{self, Exchange, Quoting};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::NextStateKind;
use oclaw::wire::openai::ChatRequest;
use serde_json::{Value, json};

use crate::forge::captured;
use crate::harness::skip;

/// Reads the log-probs of a choice's tokens from a whole answer, and why they are
/// not for training.
fn read_log_probs(input: &Value) -> (Option<Vec<Option<f32>>>, Option<&'static str>) {
    let entries = input["choice"]["logprobs"]["content"].as_array().map_or(0, Vec::len);
    let mut choice = input["choice"].clone();
    choice["message"] = json!({"role": "assistant", "content": "a"});
    choice["finish_reason"] = json!("stop");
    choice["prompt_token_ids"] = json!([1]);
    choice["response_token_ids"] = (0..entries.max(1)).collect::<Vec<_>>().into();
    let body = br#"{"model":"m","messages":[{"role":"user","content":"q"}]}"#;
    let request = ChatRequest::read(body).unwrap();
    let prepared = prepare(body, &request, Dialect::Sglang);
    let answer = read_answer(json!({"choices": [choice]}).to_string().as_bytes(), &prepared);
    let found = &answer.captured[0];
    (found.log_probs.clone(), found.untrainable_reason)
}

/// Reads a choice's log-probs from a whole answer.
///
/// Deliberate difference: the reference writes 0.0, which is probability 1, for an
/// entry without a log-prob, and leaves out what is no entry. Here a gap is a null
/// slot if it is the last token's, which some servers leave out, and otherwise the
/// whole list is not known and the row says why; so with one above 0.
pub(super) fn extract_log_probs(input: &Value, output: &Value) {
    let entries = input["choice"]["logprobs"]["content"].as_array();
    let values: Vec<_> =
        entries.into_iter().flatten().map(|entry| entry["logprob"].as_f64()).collect();
    let (log_probs, reason) = read_log_probs(input);
    let (last, before) = values.split_last().map_or((None, &[][..]), |(last, rest)| (*last, rest));
    let sound = |value: f64| value <= 1e-3;
    if values.is_empty() {
        assert_eq!(output, &json!([]), "{input}");
        assert_eq!((log_probs, reason), (None, Some("no_log_probs")), "{input}");
    } else if last.is_none_or(sound) && before.iter().all(|value| value.is_some_and(sound)) {
        let wanted = values.iter().map(|value| value.map(|value| value as f32)).collect();
        assert_eq!(log_probs, Some(wanted), "{input}");
        let recorded = output.as_array().unwrap().iter().map(|value| value.as_f64().unwrap());
        let told = values.iter().map(|value| value.unwrap_or(0.0));
        assert!(last.is_none() || recorded.eq(told), "{input}");
    } else {
        assert_eq!((log_probs, reason), (None, Some("log_probs_misaligned")), "{input}");
    }
}

/// The recorded cases have no sound answer and no gap at the end alone.
#[test]
fn golden_log_probs_may_lack_the_last_alone() {
    let entry = |value: f64| json!({"token": "a", "logprob": value});
    let gap = json!({"token": "b"});
    for (content, last, recorded) in [
        ([entry(-0.5), entry(-2.0)], Some(-2.0), [-0.5, -2.0]),
        ([entry(-0.5), gap], None, [-0.5, 0.0]),
    ] {
        let input = json!({"choice": {"logprobs": {"content": content}}});
        assert_eq!(read_log_probs(&input), (Some(vec![Some(-0.5), last]), None), "{input}");
        extract_log_probs(&input, &json!(recorded));
    }
}

/// Leaves out what quoting adds: marks at line starts, spaces that break tokens.
fn bare(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_whitespace() && *letter != '>').collect()
}

/// Deliberate difference: the prompts are our own, so lengths and hashes are not
/// compared. They are for the same roles and hold the answer, what came next, and
/// who said it.
pub(super) fn judge_prompt(input: &Value, output: &Value) {
    let text = |key: &str| input[key].as_str().unwrap_or_default();
    let (answer, next, role) = (text("response_text"), text("next_state_text"), text("role"));
    let turn = Turn {
        response: json!({"role": "assistant", "content": answer}).to_string(),
        next_state: Some(json!([{"role": role, "content": next}]).to_string()),
        next_state_kind: match role {
            "tool" => NextStateKind::Tool,
            _ => NextStateKind::User,
        },
        ..captured("s", 1)
    };
    let quoting = Quoting::default();
    let exchange = Exchange::of(&turn, quoting).unwrap();
    let messages = match text("kind") {
        "hint_judge" => hint::ask(hint::PROMPT, &exchange),
        "prm_eval" | "rl_prm" => judge::ask(judge::PROMPT, &exchange),
        other => {
            return skip(&format!("unknown prompt {other}"));
        }
    };
    let roles = |list: &[Value]| list.iter().map(|one| one["role"].clone()).collect::<Vec<_>>();
    assert_eq!(roles(&messages), roles(output.as_array().unwrap()), "{input}");
    let shown = messages[1]["content"].as_str().unwrap();
    for (words, limit) in [(answer, quoting.answer), (next, quoting.next_state)] {
        let whole = words.chars().count() <= limit;
        assert!(!whole || bare(shown).contains(&bare(words)), "{input}: {shown}");
        assert!(whole || shown.contains("characters left out"), "{input}");
    }
    let (heading, other) = match role {
        "tool" => ("=== TOOL RESULT ===", "NEXT MESSAGE OF THE USER"),
        _ => ("=== NEXT MESSAGE OF THE USER ===", "TOOL RESULT"),
    };
    assert!(shown.contains(heading) && !shown.contains(other), "{input}: {shown}");
    assert!(messages[0]["content"].as_str().unwrap().contains("\\boxed{"), "{input}");
}
