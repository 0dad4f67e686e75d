//! `oclaw teacher-lp --topk` on the tiny models: in this process and through real
//! sockets, held against the log-softmax of the model itself.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use axum::Json;
use axum::routing::post;
use oclaw::model::{LoadOptions, Model};
use oclaw::serving;
use oclaw::table::Format;
use oclaw::template::{Chat, Rendering, enhanced_messages};
use oclaw::trajectory::words::LogProbKind;
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};
use tokio::runtime::Runtime;

use crate::cli::judge::read;
use crate::forge::{captured, write};
use crate::harness::fake_engine::FakeEngine;
use crate::harness::{fixture_models as models, oclaw};

/// Longer than a block of positions.
const RESPONSE: i32 = 20;
const NEAR: f32 = 1e-4;

fn chat() -> Chat {
    Chat::load(&models().join("tiny-qwen3")).unwrap()
}

fn model(name: &str) -> Model {
    Model::load(&models().join(name), &LoadOptions::default()).unwrap()
}

fn prompt(chat: &Chat, messages: &[Value]) -> Vec<i32> {
    let extra = Map::new();
    let rendering = Rendering { messages, tools: None, add_generation_prompt: true, extra: &extra };
    chat.prompt_ids(&rendering).unwrap()
}

fn messages() -> Vec<Value> {
    vec![json!({"role": "user", "content": "Name a colour."})]
}

/// Three turns with hints, of the policies 7, 0 and 9, and one without.
fn hinted(folder: &Path) -> PathBuf {
    let chat = chat();
    let with = |number: u32, version: &str, hints: &[&str]| {
        let hints: Vec<String> = hints.iter().map(|hint| (*hint).to_owned()).collect();
        Turn {
            messages: Value::from(messages()).to_string(),
            prompt_ids: Some(prompt(&chat, &messages())),
            response_ids: Some((0..RESPONSE).map(|place| 60 + 37 * place % 900).collect()),
            rollout_log_probs: Some(vec![Some(-1.5); RESPONSE as usize]),
            usage_completion_tokens: Some(RESPONSE as u32),
            ends_with_stop_token: Some(false),
            weight_version: Some(version.to_owned()),
            weight_version_end: Some(version.to_owned()),
            hints: (!hints.is_empty()).then_some(hints),
            ..captured("s", number)
        }
    };
    let mut tempered = with(1, "7", &["Say blue.", "One word only."]);
    tempered.sampling.log_prob_kind = LogProbKind::Tempered;
    let turns =
        [tempered, with(2, "0", &["Say red."]), with(3, "9", &["Say so."]), with(4, "7", &[])];
    let stages = [Writer::Serve, Writer::Judge, Writer::Hint];
    write(&folder.join("hinted.parquet"), Format::Parquet, &stages, &turns)
}

/// Returns the whole log-softmax before each token of the response.
fn rows(model: &Model, prompt: &[i32], response: &[i32], temperature: f64) -> Vec<Vec<f32>> {
    let ids: Vec<i64> = prompt.iter().chain(response).map(|id| i64::from(*id)).collect();
    tch::no_grad(|| {
        let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
        let log_probs = (model.head(&hidden) / temperature).log_softmax(-1, Kind::Float);
        let places = prompt.len() - 1..ids.len() - 1;
        places.map(|place| Vec::try_from(&log_probs.get(place as i64)).unwrap()).collect()
    })
}

#[track_caller]
fn near(found: f32, wanted: f32) {
    assert!((found - wanted).abs() <= NEAR, "{found}, wanted {wanted}");
}

/// The ids are the likeliest of each row, the values theirs.
#[track_caller]
fn check_top(rows: &[Vec<f32>], ids: &[i32], values: &[f32], k: usize) {
    assert_eq!((ids.len(), values.len()), (rows.len() * k, rows.len() * k));
    for (row, (ids, values)) in rows.iter().zip(ids.chunks(k).zip(values.chunks(k))) {
        let mut sorted = row.clone();
        sorted.sort_by(|left, right| right.total_cmp(left));
        for ((id, value), wanted) in ids.iter().zip(values).zip(sorted) {
            near(row[*id as usize], *value);
            near(*value, wanted);
        }
    }
}

/// Holds all columns of one candidate against the models themselves.
fn check_candidate(turn: &Turn, index: usize, teacher: &Model, student: &Model, temperature: f64) {
    let (chat, k) = (chat(), usize::from(turn.topk.unwrap()));
    assert_eq!(turn.teacher_temperature, Some(temperature as f32));
    let response = turn.response_ids.as_ref().unwrap();
    let hint = &turn.hints.as_ref().unwrap()[index];
    let enhanced = prompt(&chat, &enhanced_messages(&messages(), hint).unwrap());
    let plain = rows(student, &prompt(&chat, &messages()), response, temperature);
    let hinted = rows(teacher, &enhanced, response, temperature);
    let student_ids = turn.student_topk_ids.as_ref().unwrap();
    check_top(&plain, student_ids, turn.student_topk_log_probs.as_ref().unwrap(), k);
    let part =
        |lists: &Option<Vec<Option<Vec<f32>>>>| lists.as_ref().unwrap()[index].clone().unwrap();
    let ids = turn.teacher_topk_ids.as_ref().unwrap()[index].clone().unwrap();
    check_top(&hinted, &ids, &part(&turn.teacher_topk_log_probs), k);
    let log_probs = part(&turn.teacher_log_probs);
    assert_eq!(log_probs.len(), response.len());
    for ((row, id), value) in hinted.iter().zip(response).zip(log_probs) {
        near(value, row[*id as usize]);
    }
    let at_student = part(&turn.teacher_at_student);
    assert_eq!(at_student.len(), student_ids.len());
    for ((place, id), value) in student_ids.iter().enumerate().zip(at_student) {
        near(value, hinted[place / k][*id as usize]);
    }
}

/// Runs the command and returns its rows, which `lint` accepts, and its talk.
fn teach(folder: &Path, flags: &[&str], code: i32) -> (Vec<Turn>, String) {
    let (input, output) = (hinted(folder), folder.join("taught.parquet"));
    let mut command = oclaw();
    command.arg("teacher-lp").args(flags).args(["--replace", "-o"]).args([&output, &input]);
    let run = command.assert().code(code);
    oclaw().arg("lint").arg(&output).assert().success();
    (read(&output), String::from_utf8_lossy(&run.get_output().stderr).into_owned())
}

fn folder_of(name: &str) -> String {
    models().join(name).display().to_string()
}

#[test]
fn each_turns_policy_is_its_student() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy");
    std::fs::create_dir(&policy).unwrap();
    let other = std::fs::canonicalize(models().join("tiny-qwen2")).unwrap();
    std::os::unix::fs::symlink(other, policy.join("step-000007")).unwrap();
    let base = folder_of("tiny-qwen3");
    let flags = ["--model", &base, "--topk", "4", "--policy", policy.to_str().unwrap()];
    let (turns, _) = teach(folder.path(), &flags, 3);
    let (teacher, seventh) = (model("tiny-qwen3"), model("tiny-qwen2"));
    check_candidate(&turns[0], 0, &teacher, &seventh, f64::from(0.7_f32));
    check_candidate(&turns[0], 1, &teacher, &seventh, f64::from(0.7_f32));
    check_candidate(&turns[1], 0, &teacher, &teacher, 1.0);
    let versions: Vec<_> = turns.iter().map(|turn| turn.student_version.as_deref()).collect();
    assert_eq!(versions, [Some("7"), Some("0"), None, None]);
    let error = turns[2].teacher_error.as_ref().unwrap()[0].as_ref().unwrap();
    assert!(
        error.starts_with("student: there is no `") && error.ends_with("step-000009`"),
        "{error}"
    );
    assert_eq!((turns[2].topk, &turns[2].teacher_topk_ids), (Some(4), &Some(vec![None])));
    assert_eq!((turns[3].topk, &turns[3].teacher_topk_ids), (None, &None));
}

#[test]
fn the_model_is_its_own_student_by_default() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder_of("tiny-llama");
    let (turns, talk) = teach(folder.path(), &["--model", &base], 0);
    assert!(!talk.contains("likeliest"), "{talk}");
    assert!(turns[..3].iter().all(|turn| turn.topk == Some(4)));
    let (turns, _) = teach(folder.path(), &["--model", &base, "--topk", "1"], 0);
    let teacher = model("tiny-llama");
    assert_eq!(turns[0].teacher.as_deref(), Some("tiny-llama"));
    for turn in &turns[1..3] {
        assert_eq!(turn.student_version.as_deref(), Some("tiny-llama"));
        check_candidate(turn, 0, &teacher, &teacher, 1.0);
    }
}

#[test]
fn servers_give_the_same_numbers() {
    let runtime = Runtime::new().unwrap();
    let start = |name| runtime.block_on(serving::start(serving::Options::new(models().join(name))));
    let (teacher, student) = (start("tiny-qwen3").unwrap(), start("tiny-qwen2").unwrap());
    let (base, urls) = (folder_of("tiny-qwen3"), [teacher.url(), student.url()]);
    let flags = ["--engine", &urls[0], "--tokenizer", &base, "--topk", "4", "--student", &urls[1]];
    let folder = tempfile::tempdir().unwrap();
    let (turns, _) = teach(folder.path(), &flags, 0);
    let models = (model("tiny-qwen3"), model("tiny-qwen2"));
    for turn in &turns[..3] {
        assert!(turn.student_version.is_some());
        for index in 0..turn.hints.as_ref().unwrap().len() {
            check_candidate(turn, index, &models.0, &models.1, 1.0);
        }
    }
    runtime.block_on(teacher.shutdown());
    runtime.block_on(student.shutdown());
}

/// Scores a prompt as vLLM tells it.
fn completion(model: &Model, body: &Value) -> Value {
    let ids: Vec<i32> = serde_json::from_value(body["prompt"].clone()).unwrap();
    let told = body["prompt_logprobs"].as_u64().unwrap() as usize;
    let rows = rows(model, &ids[..1], &ids[1..], 1.0);
    let entries = rows.iter().zip(&ids[1..]).map(|(row, own)| {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|left, right| row[*right].total_cmp(&row[*left]));
        order.truncate(told);
        order.push(*own as usize);
        let entry = |id: usize| (id.to_string(), json!({"logprob": row[id], "rank": null}));
        Value::Object(order.into_iter().map(entry).collect())
    });
    let entries: Vec<Value> = std::iter::once(Value::Null).chain(entries).collect();
    json!({"choices": [{"prompt_token_ids": ids, "prompt_logprobs": entries}]})
}

/// A vLLM that scores prompts by a tiny model.
fn vllm(runtime: &Runtime, name: &str) -> String {
    let model = Arc::new(Mutex::new(model(name)));
    let answer = move |Json(body): Json<Value>| {
        let told = completion(&model.lock().unwrap(), &body);
        async move { Json(told) }
    };
    let routes = axum::Router::new().route("/v1/completions", post(answer));
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("vllm+http://{}", listener.local_addr().unwrap());
    runtime.spawn(async move { axum::serve(listener, routes).await });
    url
}

#[test]
fn vllm_gives_the_same_numbers_as_far_as_its_list_reaches() {
    let runtime = Runtime::new().unwrap();
    let (url, base) = (vllm(&runtime, "tiny-qwen3"), folder_of("tiny-qwen3"));
    let flags = ["--engine", &url, "--engine-model", "q", "--tokenizer", &base];
    let teacher = model("tiny-qwen3");
    let folder = tempfile::tempdir().unwrap();
    let (turns, talk) = teach(folder.path(), &flags, 0);
    assert!(!talk.contains("20 likeliest"), "{talk}");
    // Nobody was named whose likeliest tokens they could be.
    assert!(talk.contains("note: no likeliest tokens are recorded"), "{talk}");
    assert_eq!((turns[1].topk, &turns[1].student_topk_ids), (None, &None));
    let response = turns[1].response_ids.as_ref().unwrap();
    let enhanced = prompt(&chat(), &enhanced_messages(&messages(), "Say red.").unwrap());
    let scored = turns[1].teacher_log_probs.as_ref().unwrap()[0].as_ref().unwrap();
    assert_eq!(scored.len(), response.len());
    for ((row, id), value) in
        rows(&teacher, &enhanced, response, 1.0).iter().zip(response).zip(scored)
    {
        near(*value, row[*id as usize]);
    }
    let output = folder.path().join("lists.parquet");
    let run = oclaw()
        .arg("teacher-lp")
        .args(flags)
        .args(["--topk", "2", "--student", &base, "-o"])
        .args([&output, &hinted(folder.path())])
        .assert();
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(talk.contains("tells the 20 likeliest tokens only: a hint is unusable"), "{talk}");
    oclaw().arg("lint").arg(&output).assert().success();
    for turn in &read(&output)[..3] {
        for (index, error) in turn.teacher_error.as_ref().unwrap().iter().enumerate() {
            match error {
                None => check_candidate(turn, index, &teacher, &teacher, 1.0),
                Some(error) => assert!(error.contains("the 20 likeliest tokens only"), "{error}"),
            }
        }
    }
}

#[test]
fn who_cannot_be_teacher_or_student_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = hinted(folder.path());
    let (base, other) = (folder_of("tiny-qwen3"), folder_of("smollm2-135m-instruct"));
    let fake = FakeEngine::start();
    let (llama, gateway) = (format!("llamacpp+{}", fake.url()), format!("openai+{}", fake.url()));
    let engine = |url| vec!["--engine", url, "--engine-model", "m", "--tokenizer", &base];
    let local = |flags: &[&'static str]| [vec!["--model", &base], flags.to_vec()].concat();
    let with = |mut flags: Vec<_>, more: &[&'static str]| {
        flags.extend_from_slice(more);
        flags
    };
    let mut foreign = local(&["--topk", "4", "--student"]);
    foreign.push(&other);
    for (flags, code, words) in [
        (engine(&llama), 2, "speaks the llamacpp dialect, which has no way to score"),
        (engine(&gateway), 2, "hint: SGLang, vLLM, `oclaw engine` and a model folder can"),
        (with(engine(&llama), &["--topk", "4"]), 2, "`--topk` needs a student"),
        (local(&["--topk", "0", "--policy", "p"]), 2, "nothing to do under `--topk 0`"),
        (foreign, 1, "hint: teacher and student must share the policy's vocabulary"),
        (vec!["--model", &other, "--tokenizer", &base], 1, "is another"),
    ] {
        let run = oclaw().arg("teacher-lp").args(&flags).arg(&input).assert().code(code);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(talk.contains(words), "{flags:?}: {talk}");
    }
}
