//! The reference's own functions on recorded inputs: votes, boxes, hints,
//! messages, prompts, log-probs, samples. Every case of every function that is
//! known is run against our own; one that nobody knows is named.
//!
//! Deliberately different, each by a rule on the case and not by its name:
//! * no valid vote is null, not 0 (algorithms.md 2);
//! * boxes and hints inside `<think>` or quoted lines do not count (algorithms.md
//!   2): such a case is held against the plain second reading in `plain`;
//! * a content part that is no text is an error, it is not left out (T15);
//! * a teacher's reply must hold one entry more than the response, the first of
//!   which is dropped; the reference takes any count and pads with 0.0, which is
//!   probability 1 (protocols.md 11.1, K02, K03);
//! * each list of the likeliest tokens must hold k of them, and ours come in order;
//!   the reference takes any number, cuts, and pads with 0.0 and the ids from 0 on;
//! * prompts are our own texts: they hold the same facts, not the same letters;
//! * samples: see `samples`; log-probs of an answer: see `answers`.

mod answers;
mod samples;

use oclaw::engine::{Dialect, Engine, EngineOptions, Retries, ScoreRequest, Scores};
use oclaw::hint::{self, Keep};
use oclaw::judge;
use oclaw::template::{enhanced_messages, flatten_content, normalize_messages, strip};
use serde_json::{Value, json};

use super::plain;
use crate::harness::{golden_json, skip};

#[test]
fn every_case_of_every_function() {
    let Some(cases) = golden_json("api/cases.json") else { return };
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let (input, output) = (&case["input"], &case["output"]);
        let name = case["fn"].as_str().unwrap();
        match name.split('(').next().unwrap_or(name) {
            "majority_vote" => majority_vote(input, output),
            "parse_prm_score" => parse_prm_score(input, output),
            "parse_judge_result" => parse_judge_result(input, output),
            "select_best_hint" => select_best_hint(input, output),
            "append_hint_to_messages" => append_hint(input, output),
            "normalize_messages" => normalize(input, output),
            "flatten_message_content" => flatten(input, output),
            "is_valid_rl_score" => is_valid_rl_score(input, output),
            "extract_logprobs" => answers::extract_log_probs(input, output),
            "judge_prompt" => answers::judge_prompt(input, output),
            "combine_submit_turn_sample" => samples::with_reward(input, output),
            "opd_submit_turn_sample" => samples::taught_only(input, output),
            "combine_submit_rl_turn_sample" => samples::rewarded_only(input, output),
            "rl_submit_sequence" => samples::sequence(case),
            "post_process_rewards" if name.ends_with("(grpo)") => samples::groups(input, output),
            // Together below.
            "compute_teacher_log_probs" | "compute_teacher_topk_logprobs" => {}
            _ => skip(&format!("unknown function {name}")),
        }
    }
    teacher_log_probs(cases.iter().filter(|case| named(case, "compute_teacher_log_probs")));
    teacher_top_k(cases.iter().filter(|case| named(case, "compute_teacher_topk_logprobs")));
}

/// Whether a case is of a function; remarks may follow the name in brackets.
fn named(case: &Value, function: &str) -> bool {
    case["fn"].as_str().unwrap().split('(').next() == Some(function)
}

fn majority_vote(input: &Value, output: &Value) {
    let votes = input["scores"].as_array().unwrap();
    let votes: Vec<_> = votes.iter().map(|vote| vote.as_i64().map(|vote| vote as i8)).collect();
    let expected = match votes.iter().all(Option::is_none) {
        true => None,
        false => output.as_f64(),
    };
    assert_eq!(judge::majority(&votes).map(f64::from), expected, "{input}");
}

fn parse_prm_score(input: &Value, output: &Value) {
    let text = input["text"].as_str().unwrap();
    let reply = judge::Reply { text: text.to_owned(), finish_reason: None };
    let expected = match plain::differs(text) {
        true => plain::vote(text),
        false => output.as_i64(),
    };
    assert_eq!(judge::read(&reply).ok().map(i64::from), expected, "{input}");
    // The plain reading itself, where there is nothing on purpose.
    assert!(plain::differs(text) || plain::vote(text) == output.as_i64(), "{input}");
}

fn parse_judge_result(input: &Value, output: &Value) {
    let text = input["text"].as_str().unwrap();
    let found = hint::parse(text);
    let (vote, words) = plain::hint(text);
    let plainly = json!([vote, words]);
    let expected = if plain::differs(text) { &plainly } else { output };
    assert_eq!(json!([found.vote, found.hint]), *expected, "{input}");
    assert!(plain::differs(text) || plainly == *output, "{input}");
}

fn select_best_hint(input: &Value, output: &Value) {
    let one = |score: &Value| score.as_f64() == Some(1.0) || score == &json!(true);
    let votes = input["votes"].as_array().unwrap().iter();
    let accepted =
        votes.filter(|vote| one(&vote["score"])).filter_map(|vote| vote["hint"].as_str());
    let selected = hint::select(accepted, Keep::Longest, usize::MAX);
    let expected: Vec<_> = output["hint"].as_str().map(strip).into_iter().collect();
    assert_eq!(selected, expected, "{input}");
}

/// Whether some part of the content is no text, which Python leaves out.
fn holds_more_than_text(content: &Value) -> bool {
    let is_text = |part: &Value| part["type"] == "text" && part["text"].is_string();
    content.as_array().is_some_and(|parts| !parts.iter().all(is_text))
}

fn append_hint(input: &Value, output: &Value) {
    let messages = input["messages"].as_array().unwrap();
    let found = enhanced_messages(messages, input["hint"].as_str().unwrap());
    match messages.iter().any(|message| holds_more_than_text(&message["content"])) {
        true => assert!(found.is_err(), "{input}"),
        false => assert_eq!(json!(found.unwrap()), *output, "{input}"),
    }
}

fn normalize(input: &Value, output: &Value) {
    let messages = input["messages"].as_array().unwrap();
    let found = normalize_messages(messages);
    match messages.iter().any(|message| holds_more_than_text(&message["content"])) {
        true => assert!(found.is_err(), "{input}"),
        false => assert_eq!(json!(found.unwrap()), *output, "{input}"),
    }
}

fn flatten(input: &Value, output: &Value) {
    let found = flatten_content(&input["content"]);
    match holds_more_than_text(&input["content"]) {
        true => assert!(found.is_err(), "{input}"),
        false => assert_eq!(json!(found.unwrap()), *output, "{input}"),
    }
}

/// A score is worth training on if it is a vote other than 0. Ours are votes by
/// type, so what is left to compare is what the parser and the majority allow.
fn is_valid_rl_score(input: &Value, output: &Value) {
    let number = input["score"].as_f64().or(input["score"].as_bool().map(f64::from));
    let vote = number.filter(|number| number.fract() == 0.0).map(|number| number as i8);
    let text = vote.map_or_else(String::new, |vote| format!("\\boxed{{{vote}}}"));
    let score = judge::read(&judge::Reply { text, finish_reason: None }).ok();
    assert_eq!(score.is_some_and(|score| score != 0), output.as_bool().unwrap(), "{input}");
}

/// Plays each recorded reply to our client over HTTP.
fn teacher_log_probs<'a>(cases: impl Iterator<Item = &'a Value>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for case in cases {
            let input = &case["input"];
            let length = |name: &str| input[name].as_u64().unwrap() as usize;
            let (total, response) = (length("n_input_ids"), length("response_len"));
            let entries = input["reply"]["meta_info"]["input_token_logprobs"].as_array();
            let entries = entries.cloned().unwrap_or_default();
            // The ids that were sent, as far as the reply repeats them.
            let told: Vec<_> = entries.iter().filter_map(|entry| entry[1].as_i64()).collect();
            let start = total.saturating_sub(response);
            let mut ids = vec![0; total];
            for (slot, id) in ids.iter_mut().skip(start.saturating_sub(1)).zip(&told) {
                *slot = *id as i32;
            }
            let score =
                played(&input["reply"], ScoreRequest { ids, start, ..Default::default() }).await;
            let whole =
                total > response && told.len() == entries.len() && entries.len() == response + 1;
            match (whole, score) {
                (true, Ok(values)) => {
                    let output = case["output"].as_array().unwrap();
                    let expected: Vec<_> =
                        output.iter().map(|value| value.as_f64().unwrap() as f32).collect();
                    assert_eq!(values.log_probs, expected, "{input}");
                }
                (false, Err(_)) => {}
                (_, found) => panic!("{input}: {found:?}"),
            }
        }
    });
}

/// Plays each recorded reply, which has the likeliest tokens only, together with
/// the log-probs of the tokens themselves, without which ours believes nothing.
fn teacher_top_k<'a>(cases: impl Iterator<Item = &'a Value>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for case in cases {
            let input = &case["input"];
            let length = |name: &str| input[name].as_u64().unwrap() as usize;
            let (total, response, k) = (length("n_input_ids"), length("response_len"), length("k"));
            let lists = input["reply"]["meta_info"]["input_top_logprobs"].as_array();
            let lists = lists.cloned().unwrap_or_default();
            let mut reply = input["reply"].clone();
            let own = (0..=response).map(|place| json!([(place > 0).then_some(-1.0), 0, null]));
            reply["meta_info"]["input_token_logprobs"] = own.collect();
            let start = total.saturating_sub(response);
            let request = ScoreRequest { ids: vec![0; total], start, top_k: k, chosen: vec![] };
            let scores = played(&reply, request).await;
            let is_whole = |list: &Value| list.as_array().is_some_and(|list| list.len() == k);
            let whole =
                total > response && lists.len() == response + 1 && lists[1..].iter().all(is_whole);
            match (whole, scores) {
                (true, Ok(scores)) => assert_eq!(pairs(&scores, k), ordered(&case["output"])),
                (false, Err(_)) => {}
                (_, found) => panic!("{input}: {found:?}"),
            }
        }
    });
}

type Pairs = Vec<Vec<(i64, f32)>>;

fn pairs(scores: &Scores, k: usize) -> Pairs {
    let ids = scores.top_ids.iter().map(|id| i64::from(*id));
    let pairs: Vec<_> = ids.zip(scores.top_log_probs.iter().copied()).collect();
    pairs.chunks(k).map(<[_]>::to_vec).collect()
}

/// The reference's rows of log-probs and of ids, likeliest first.
fn ordered(output: &Value) -> Pairs {
    let rows = |index: usize| output[index].as_array().unwrap();
    let rows = rows(0).iter().zip(rows(1)).map(|(values, ids)| {
        let (values, ids) = (values.as_array().unwrap(), ids.as_array().unwrap());
        let pair =
            |(id, value): (&Value, &Value)| (id.as_i64().unwrap(), value.as_f64().unwrap() as f32);
        let mut row: Vec<_> = ids.iter().zip(values).map(pair).collect();
        row.sort_by(|left, right| right.1.total_cmp(&left.1));
        row
    });
    rows.collect()
}

async fn played(reply: &Value, request: ScoreRequest) -> Result<Scores, oclaw::engine::Error> {
    let body = reply.to_string();
    let answer = move || async move { ([("content-type", "application/json")], body) };
    let routes = axum::Router::new().route("/generate", axum::routing::post(answer));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut options = EngineOptions::new(format!("http://{}", listener.local_addr().unwrap()));
    options.dialect = Some(Dialect::Sglang);
    options.retries = Retries::none();
    let server = tokio::spawn(async move { axum::serve(listener, routes).await });
    let engine = Engine::attach(options).await.unwrap();
    let score = engine.score(&request).await;
    server.abort();
    score
}
