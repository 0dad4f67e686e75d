//! Log-probs of given tokens: what is asked of each kind of server, and what of
//! its answers is believed.

use std::collections::BTreeSet;

use oclaw::engine::{Engine, Error, ScoreRequest, Scores};
use serde_json::{Value, json};

use super::options;
use crate::harness::fake_engine::{FakeEngine, Reply};

/// Asks for the scores of `[5, 6, 7, 8]` from 2 on and returns the outcome.
async fn score(reply: Reply) -> (FakeEngine, Result<Vec<f32>, Error>) {
    let fake = FakeEngine::sglang();
    fake.on("/generate", [reply]);
    let engine = Engine::attach(options(fake.url())).await.unwrap();
    let scores = ScoreRequest { ids: vec![5, 6, 7, 8], start: 2, ..Default::default() };
    let scores = engine.score(&scores).await.map(|scores| scores.log_probs);
    (fake, scores)
}

#[tokio::test]
async fn scores_start_one_earlier_and_drop_the_null() {
    let entries = json!([[null, 6, null], [-1.25, 7, null], [-0.5, 8, null]]);
    let meta = json!({"weight_version": "7", "prompt_tokens": 4, "input_token_logprobs": entries});
    let (fake, scores) = score(Reply::json(200, json!({"text": "", "meta_info": meta}))).await;
    assert_eq!(scores.unwrap(), [-1.25, -0.5]);
    let expected = json!({
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": true,
        "logprob_start_len": 1,
    });
    assert_eq!(fake.seen().last().unwrap().body, expected);
}

#[tokio::test]
async fn scores_that_do_not_fit_are_no_scores() {
    let entries = |entries: Value| json!({"meta_info": {"input_token_logprobs": entries}});
    let table = [
        (200, json!({"text": ""}), "malformed"),
        (200, json!({"meta_info": {}}), "malformed"),
        (200, entries(json!([])), "malformed"),
        (200, entries(json!([[null, 7, null], [-0.5, 8, null]])), "malformed"),
        (200, entries(json!([[null, 6, null], [-1.0, 9, null], [-0.5, 8, null]])), "malformed"),
        (
            200,
            entries(json!([[null, 5, null], [-1.0, 6, null], [-1.0, 7, null], [-0.5, 8, null]])),
            "malformed",
        ),
        (200, entries(json!([[null, 6, null], [null, 7, null], [-0.5, 8, null]])), "malformed"),
        (400, json!({"error": {"message": "too long"}}), "status"),
        (200, json!([{"meta_info": {}}]), "malformed"),
    ];
    for (status, body, kind) in table {
        let shown = body.to_string();
        let (_, scores) = score(Reply::json(status, body)).await;
        assert_eq!(scores.unwrap_err().kind(), kind, "{shown}");
    }
}

/// A made-up log-prob, lower for higher ids, of a quarter's grid.
fn made_up(position: usize, id: i64) -> f64 {
    -0.25 * (id + position as i64 % 2) as f64 - 0.25
}

/// What SGLang would answer to the part `from..to` of a request's positions.
fn part(request: &ScoreRequest, from: usize, to: usize, version: &str) -> Value {
    let triple = |position, id: i64| json!([made_up(position, id), id, null]);
    let width = request.chosen.len() / (request.ids.len() - request.start);
    let chosen = &request.chosen[(from - request.start) * width..(to - request.start) * width];
    let union: BTreeSet<i32> = chosen.iter().copied().collect();
    let mut own = vec![json!([null, request.ids[from - 1], null])];
    let (mut top, mut at) = (vec![Value::Null], vec![Value::Null]);
    for position in from..to {
        own.push(triple(position, request.ids[position].into()));
        top.push((1..=request.top_k as i64).map(|id| triple(position, id)).collect());
        at.push(union.iter().map(|id| triple(position, i64::from(*id))).collect());
    }
    let mut meta = json!({"weight_version": version, "input_token_logprobs": own});
    if request.top_k > 0 {
        meta["input_top_logprobs"] = top.into();
    }
    if width > 0 {
        meta["input_token_ids_logprobs"] = at.into();
    }
    json!({"text": "", "output_ids": [], "meta_info": meta})
}

/// Twenty response tokens after three, top 2, two chosen ids at each.
fn long() -> ScoreRequest {
    let ids = (0..23).map(|place| 5 + place % 7).collect();
    let chosen = (0..20).flat_map(|row| [40 + row, 30]).collect();
    ScoreRequest { ids, start: 3, top_k: 2, chosen }
}

async fn sglang(request: &ScoreRequest, parts: Vec<Value>) -> (FakeEngine, Result<Scores, Error>) {
    let fake = FakeEngine::sglang();
    fake.on("/generate", parts.into_iter().map(|part| Reply::json(200, part)));
    let engine = Engine::attach(options(fake.url())).await.unwrap();
    let scores = engine.score(request).await;
    (fake, scores)
}

#[tokio::test]
async fn chosen_ids_are_asked_for_in_blocks_of_sixteen() {
    let request = long();
    let parts = vec![part(&request, 3, 19, "7"), part(&request, 19, 23, "7")];
    let (fake, scores) = sglang(&request, parts).await;
    let scores = scores.unwrap();
    let at = |position: usize, id: i32| made_up(position, id.into()) as f32;
    let own: Vec<f32> = (3..23).map(|place| at(place, request.ids[place])).collect();
    assert_eq!(scores.log_probs, own);
    assert_eq!(scores.top_ids, [1, 2].repeat(20));
    let top: Vec<f32> = (3..23).flat_map(|place| [at(place, 1), at(place, 2)]).collect();
    assert_eq!(scores.top_log_probs, top);
    let chosen: Vec<f32> =
        (0..20).flat_map(|row| [40 + row, 30].map(|id| at(3 + row as usize, id))).collect();
    assert_eq!(scores.chosen_log_probs, chosen);
    assert_eq!(scores.version.as_deref(), Some("7"));
    let bodies: Vec<Value> = fake.seen().into_iter().rev().take(2).map(|seen| seen.body).collect();
    for (body, (end, start)) in bodies.iter().rev().zip([(19, 2), (23, 18)]) {
        assert_eq!(body["input_ids"], json!(request.ids[..end]));
        assert_eq!(
            (&body["logprob_start_len"], &body["top_logprobs_num"]),
            (&json!(start), &json!(2))
        );
    }
    assert_eq!(bodies[0]["token_ids_logprob"], json!([30, 56, 57, 58, 59]));
    assert_eq!(bodies[1]["token_ids_logprob"].as_array().unwrap().len(), 17);
}

#[tokio::test]
async fn parts_of_other_weights_do_not_mix() {
    let request = long();
    let parts = vec![part(&request, 3, 19, "7"), part(&request, 19, 23, "8")];
    let error = sglang(&request, parts).await.1.unwrap_err().to_string();
    assert!(error.ends_with("the weights changed between the parts of one scoring"), "{error}");
}

/// Two response tokens after two, top 2, two chosen ids at each.
fn short() -> ScoreRequest {
    ScoreRequest { ids: vec![5, 6, 7, 8], start: 2, top_k: 2, chosen: vec![3, 9, 9, 4] }
}

#[tokio::test]
async fn the_likeliest_come_in_order_whatever_the_server_does() {
    let request = short();
    let mut reply = part(&request, 2, 4, "7");
    reply["meta_info"]["input_top_logprobs"][1].as_array_mut().unwrap().reverse();
    reply["meta_info"]["input_token_ids_logprobs"][2].as_array_mut().unwrap().reverse();
    let scores = sglang(&request, vec![reply]).await.1.unwrap();
    assert_eq!(scores, sglang(&request, vec![part(&request, 2, 4, "7")]).await.1.unwrap());
    assert_eq!(scores.top_ids, [1, 2, 1, 2]);
}

// K02 for lists: none of it is mended.
#[tokio::test]
async fn lists_that_do_not_fit_are_no_scores() {
    let (top, chosen) = ("input_top_logprobs", "input_token_ids_logprobs");
    let twice = json!([[-0.5, 1, null], [-0.75, 1, null]]);
    let table = [
        (top, json!(null), "no `meta_info.input_top_logprobs`"),
        (
            top,
            json!([null, [[-0.5, 1, null], [-0.75, 2, null]]]),
            "2 lists of `input_top_logprobs`",
        ),
        (top, json!([null, [], [], []]), "4 lists of `input_top_logprobs` for 3 tokens"),
        (top, json!([null, null, []]), "a null in `input_top_logprobs` at place 1"),
        (
            top,
            json!([null, [[null, 1, null], [-1, 2, null]], []]),
            "a null in `input_top_logprobs`",
        ),
        (top, json!([null, [[-0.5, 1, null]], []]), "1 likeliest tokens for 2 at place 1"),
        (
            top,
            json!([null, [[-1, 1, null], [-2, 2, null], [-3, 3, null]], []]),
            "3 likeliest tokens",
        ),
        (top, json!([null, twice, []]), "id 1 twice at place 1"),
        (top, json!([null, [[-1, -4, null], [-2, 2, null]], []]), "-4 is no token id"),
        (chosen, json!(null), "no `meta_info.input_token_ids_logprobs`"),
        (chosen, json!([null, [[-1, 3, null], [-1, 4, null], [-1, 9, null]]]), "2 lists of"),
        (chosen, json!([null, [[-1, 3, null], [-1, 4, null]], []]), "2 chosen tokens for 3"),
        (
            chosen,
            json!([null, [[-1, 3, null], [-1, 4, null], [-1, 10, null]], []]),
            "id 10 was not asked for, at place 1",
        ),
        (chosen, json!([null, [[-1, 3, null], [-1, 4, null], [-1, 4, null]], []]), "id 4 twice"),
        (
            chosen,
            json!([null, [[-1, 3, null], [-1, 4, null], [-1, 9, null], [-1, 11, null]], []]),
            "4 chosen tokens for 3 at place 1",
        ),
    ];
    let request = short();
    for (name, lists, words) in table {
        let mut reply = part(&request, 2, 4, "7");
        reply["meta_info"][name] = lists;
        let error = sglang(&request, vec![reply]).await.1.unwrap_err();
        assert_eq!(error.kind(), "malformed");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
}

/// What vLLM would answer: the ids `1..=told` are the likeliest.
fn completion(ids: &[i32], told: i64) -> Value {
    let entries = ids.iter().enumerate().map(|(position, own)| {
        if position == 0 {
            return Value::Null;
        }
        let own = i64::from(*own);
        let listed = (1..=told).chain((own > told).then_some(own));
        let entry = |id: i64| {
            let told = json!({"logprob": made_up(position, id), "rank": id, "decoded_token": "x"});
            (id.to_string(), told)
        };
        Value::Object(listed.map(entry).collect())
    });
    let entries: Vec<Value> = entries.collect();
    json!({"choices": [{
        "index": 0, "text": " x", "finish_reason": "length", "token_ids": [9],
        "prompt_token_ids": ids, "prompt_logprobs": entries,
    }]})
}

async fn vllm(request: &ScoreRequest, body: Value) -> (FakeEngine, Result<Scores, Error>) {
    let fake = FakeEngine::start();
    fake.on("/v1/completions", [Reply::json(200, body)]);
    let mut options = options(format!("vllm+{}", fake.url()));
    options.model = Some("q".to_owned());
    let engine = Engine::connect(options).await.unwrap();
    let scores = engine.score(request).await;
    (fake, scores)
}

#[tokio::test]
async fn vllm_tells_a_prompts_log_probs() {
    let at = |position: usize, id: i64| made_up(position, id) as f32;
    // Own ids only.
    let request = ScoreRequest { top_k: 0, chosen: vec![], ..short() };
    let (fake, scores) = vllm(&request, completion(&request.ids, 0)).await;
    let expected = Scores { log_probs: vec![at(2, 7), at(3, 8)], ..Scores::default() };
    assert_eq!(scores.unwrap(), expected);
    let body = json!({
        "model": "q", "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0,
        "prompt_logprobs": 0, "return_token_ids": true,
    });
    assert_eq!(fake.seen().last().unwrap().body, body);
    // The likeliest too: 8 is one of them, 7 is one of them.
    let request = ScoreRequest { ids: vec![5, 6, 30, 1], chosen: vec![], ..short() };
    let (fake, scores) = vllm(&request, completion(&request.ids, 2)).await;
    let expected = Scores {
        log_probs: vec![at(2, 30), at(3, 1)],
        top_ids: vec![1, 2, 1, 2],
        top_log_probs: vec![at(2, 1), at(2, 2), at(3, 1), at(3, 2)],
        ..Scores::default()
    };
    assert_eq!(scores.unwrap(), expected);
    assert_eq!(fake.seen().last().unwrap().body["prompt_logprobs"], 2);
    // Chosen ones as far as its 20 reach, and the token's own.
    let request = ScoreRequest { ids: vec![5, 6, 30, 8], chosen: vec![3, 30, 20, 4], ..short() };
    let (fake, scores) = vllm(&request, completion(&request.ids, 20)).await;
    let scores = scores.unwrap();
    assert_eq!(scores.chosen_log_probs, [at(2, 3), at(2, 30), at(3, 20), at(3, 4)]);
    assert_eq!(scores.top_ids, [1, 2, 1, 2]);
    assert_eq!(fake.seen().last().unwrap().body["prompt_logprobs"], 20);
    let request = ScoreRequest { chosen: vec![3, 21, 20, 4], ..request };
    let error = vllm(&request, completion(&request.ids, 20)).await.1.unwrap_err();
    assert_eq!(error.kind(), "not_listed");
    assert!(error.to_string().ends_with("the 20 likeliest tokens only, and 21 is none of them"));
}

#[tokio::test]
async fn what_vllm_says_is_held_against_the_ids() {
    let request = ScoreRequest { ids: vec![5, 6, 30, 1], chosen: vec![], ..short() };
    let good = completion(&request.ids, 2);
    let change = |change: &dyn Fn(&mut Value)| {
        let mut body = good.clone();
        change(&mut body["choices"][0]);
        body
    };
    let entry = |place: usize, entry: Value| {
        change(&move |choice: &mut Value| choice["prompt_logprobs"][place] = entry.clone())
    };
    let table = [
        (json!({"choices": []}), "0 choices for 1"),
        (change(&|choice| choice["prompt_token_ids"] = json!([5, 6, 30, 2])), "not the ids"),
        (change(&|choice| choice["prompt_logprobs"] = Value::Null), "no `choices[0].prompt"),
        (
            change(&|choice| {
                choice["prompt_logprobs"].as_array_mut().unwrap().remove(0);
            }),
            "3 log-probs for 4 tokens",
        ),
        (entry(2, Value::Null), "a null at place 2"),
        (entry(2, json!({"1": {"logprob": -1}, "2": {"logprob": -2}})), "no log-prob of id 30"),
        (entry(3, json!({"1": {"logprob": -1}})), "1 likeliest tokens for 2 at place 3"),
        (
            entry(3, json!({"1": {"logprob": -1}, "2": {"logprob": -2}, "3": {"logprob": -3}})),
            "3 likeliest tokens for 2 at place 3",
        ),
        (
            entry(
                2,
                json!({"1": {"logprob": -1}, "2": {"logprob": -2}, "30": {"logprob": -9999.0}}),
            ),
            "no log-prob at place 2",
        ),
        (entry(2, json!({"x": {"logprob": -1}})), "`x` is no token id"),
    ];
    for (body, words) in table {
        let error = vllm(&request, body).await.1.unwrap_err();
        assert_eq!(error.kind(), "malformed");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    let request = ScoreRequest { top_k: 21, ..request };
    let (fake, scores) = vllm(&request, good).await;
    assert_eq!(scores.unwrap_err().kind(), "unsupported");
    assert!(fake.paths().is_empty());
}
