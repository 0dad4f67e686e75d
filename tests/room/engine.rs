//! The client, against a scripted server.

mod pool;
mod score;

use std::time::Duration;

use oclaw::engine::{ChatRequest, Dialect, Engine, EngineOptions, Error, Retries, ScoreRequest};
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::harness::fake_engine::{FakeEngine, Reply};

fn options(url: impl Into<String>) -> EngineOptions {
    let mut options = EngineOptions::new(url);
    options.retries = Retries {
        tries: 3,
        first_wait: Duration::from_millis(1),
        longest_wait: Duration::from_secs(5),
    };
    options
}

fn chat(content: &str) -> Reply {
    Reply::json(
        200,
        json!({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}),
    )
}

/// An engine of the generic dialect whose model is named, so that nothing is
/// asked before the test does.
async fn generic(url: String) -> Engine {
    let mut options = options(url);
    options.dialect = Some(Dialect::Generic);
    options.model = Some("m".to_owned());
    Engine::connect(options).await.unwrap()
}

fn one_message() -> ChatRequest {
    ChatRequest { messages: vec![json!({"role": "user", "content": "hi"})], ..Default::default() }
}

#[tokio::test]
async fn each_dialect_is_known_by_a_route_of_its_own() {
    let table: [(&str, Value, Dialect); 7] = [
        ("/model_info", json!({"model_path": "/m", "weight_version": "default"}), Dialect::Sglang),
        ("/get_model_info", json!({"model_path": "/m"}), Dialect::Sglang),
        ("/version", json!({"version": "0.33.0"}), Dialect::Vllm),
        ("/props", json!({"default_generation_settings": {}}), Dialect::LlamaCpp),
        ("/health", json!({"status": "ok"}), Dialect::LlamaCpp),
        ("/nothing", json!({}), Dialect::Generic),
        ("/version", json!("a page that says nothing"), Dialect::Generic),
    ];
    for (path, body, dialect) in table {
        let fake = FakeEngine::start();
        fake.on(path, [Reply::json(200, body)]);
        let engine = Engine::attach(options(fake.url())).await.unwrap();
        assert_eq!(engine.dialect(), dialect, "{path}");
    }
    let fake = FakeEngine::start();
    for path in ["/model_info", "/version", "/props", "/health"] {
        fake.on(path, [Reply::page()]);
    }
    let engine = Engine::attach(options(fake.url())).await.unwrap();
    assert_eq!(engine.dialect(), Dialect::Generic, "a gateway with a web page everywhere");
}

#[tokio::test]
async fn a_server_that_only_fails_is_away_and_one_without_json_is_none() {
    let failed = |status| Reply::json(status, json!({"error": {"message": "on fire"}}));
    let listed = Reply::json(200, json!({"data": [{"id": "m"}]}));
    // What is answered everywhere, what by the list of models, and the verdict.
    let table = [
        (failed(500), None, Some("status")),
        (failed(599), Some(listed.clone()), Some("status")),
        (Reply::page_with(500), None, Some("status")),
        (failed(501), Some(listed.clone()), None),
        (Reply::page(), None, Some("malformed")),
        (Reply::page_with(404), None, Some("malformed")),
        (Reply::text(200, "hello"), None, Some("malformed")),
        (Reply::text(200, ""), None, Some("malformed")),
        (Reply::page(), Some(listed.clone()), None),
        (Reply::page(), Some(failed(404)), None),
        (Reply::page(), Some(failed(500)), Some("status")),
        (Reply::text(404, "404 page not found"), None, None),
        (failed(404), None, None),
    ];
    for (everywhere, models, kind) in table {
        let fake = FakeEngine::start();
        let shown = format!("{everywhere:?} {models:?}");
        fake.otherwise(everywhere);
        if let Some(models) = models {
            fake.on("/v1/models", [models]);
        }
        let found = Engine::attach(options(fake.url())).await;
        assert_eq!(found.err().map(|error| error.kind()), kind, "{shown}");
        let named = EngineOptions { model: Some("m".to_owned()), ..options(fake.url()) };
        let found = Engine::connect(named).await;
        assert_eq!(found.err().map(|error| error.kind()), kind, "{shown}");
        // Who says what it is, is believed.
        let stated = options(format!("openai+{}", fake.url()));
        assert!(Engine::attach(stated).await.is_ok(), "{shown}");
    }
    // One path that fails says nothing about the server.
    let fake = FakeEngine::start();
    fake.on("/model_info", [failed(500)]);
    let engine = Engine::attach(options(fake.url())).await.unwrap();
    assert_eq!(engine.dialect(), Dialect::Generic);
}

#[tokio::test]
async fn a_dialect_in_the_address_is_not_probed() {
    let fake = FakeEngine::start();
    let engine = Engine::attach(options(format!("vllm+{}", fake.url()))).await.unwrap();
    assert_eq!(engine.dialect(), Dialect::Vllm);
    assert!(fake.paths().is_empty());
}

#[tokio::test]
async fn every_spelling_of_the_address_reaches_the_same_route() {
    for ending in ["", "/", "/v1", "/v1/", "/v1/chat/completions"] {
        let fake = FakeEngine::start();
        fake.on("/v1/chat/completions", [chat("yo")]);
        let engine = generic(format!("{}{ending}", fake.url())).await;
        assert_eq!(engine.chat(&one_message()).await.unwrap().content, "yo", "{ending}");
        assert_eq!(fake.paths(), ["/v1/chat/completions"], "{ending}");
    }
}

#[tokio::test]
async fn a_server_without_v1_is_found_and_remembered() {
    for elsewhere in [Reply::json(404, json!({"error": {"message": "Invalid URL"}})), Reply::page()]
    {
        let fake = FakeEngine::start();
        fake.on("/api/v1/chat/completions", [elsewhere]);
        fake.on("/api/chat/completions", [chat("yo")]);
        let engine = generic(format!("{}/api", fake.url())).await;
        for _ in 0..2 {
            assert_eq!(engine.chat(&one_message()).await.unwrap().content, "yo");
        }
        let expected =
            ["/api/v1/chat/completions", "/api/chat/completions", "/api/chat/completions"];
        assert_eq!(fake.paths(), expected);
    }
    let fake = FakeEngine::start();
    fake.on("/v1/chat/completions", [Reply::page()]);
    let error = generic(format!("{}/v1", fake.url())).await.chat(&one_message()).await.unwrap_err();
    assert!(matches!(error, Error::WebPage { .. }), "{error}");
}

#[tokio::test]
async fn the_model_is_the_only_one_or_must_be_named() {
    let models = |ids: &[&str]| {
        let data: Vec<_> = ids.iter().map(|id| json!({"id": id})).collect();
        [Reply::json(200, json!({"data": data}))]
    };
    let fake = FakeEngine::start();
    fake.on("/v1/models", models(&["a"]));
    assert_eq!(Engine::connect(options(fake.url())).await.unwrap().model(), Some("a"));
    fake.on("/v1/models", models(&["a", "b"]));
    let error = Engine::connect(options(fake.url())).await.unwrap_err();
    assert!(error.to_string().ends_with("serves 2 models: `a`, `b`"), "{error}");
    fake.on("/v1/models", models(&[]));
    let error = Engine::connect(options(fake.url())).await.unwrap_err();
    assert!(matches!(error, Error::NoModel { .. }), "{error}");
}

#[tokio::test]
async fn a_passing_failure_is_tried_again_and_no_other() {
    let failed = |status| Reply::json(status, json!({"error": {"message": "no"}}));
    let unknown = json!({"error": {"message": "no channel", "code": "model_not_found"}});
    let table = [
        (vec![failed(429).with("retry-after", "0"), chat("yo")], 2, None),
        (vec![failed(500), failed(503), chat("yo")], 3, None),
        (vec![failed(529), failed(529), failed(529), chat("yo")], 3, Some("status")),
        (vec![failed(429)], 3, Some("rate_limited")),
        (vec![failed(503).with("retry-after", "3600")], 1, Some("status")),
        (vec![Reply::json(503, unknown)], 1, Some("status")),
        (vec![failed(400)], 1, Some("status")),
        (vec![failed(501)], 1, Some("status")),
        (vec![failed(401)], 1, Some("unauthorized")),
        (vec![Reply::text(200, "not json")], 1, Some("malformed")),
    ];
    for (replies, calls, kind) in table {
        let fake = FakeEngine::start();
        let shown = format!("{replies:?}");
        fake.on("/v1/chat/completions", replies);
        let outcome = generic(fake.url()).await.chat(&one_message()).await;
        assert_eq!(outcome.err().map(|error| error.kind()), kind, "{shown}");
        assert_eq!(fake.paths().len(), calls, "{shown}");
    }
}

#[tokio::test]
async fn nobody_there_and_no_answer_are_told_apart() {
    let error = Engine::attach(options("http://127.0.0.1:1")).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");

    let fake = FakeEngine::start();
    fake.hold("/v1/chat/completions");
    let mut hasty = options(fake.url());
    hasty.dialect = Some(Dialect::Generic);
    hasty.model = Some("m".to_owned());
    hasty.timeout = Duration::from_millis(50);
    hasty.retries.tries = 2;
    let error = Engine::connect(hasty).await.unwrap().chat(&one_message()).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    // On a busy machine the server hears of a call after it was given up.
    fake.arrived("/v1/chat/completions", 2);
    assert_eq!(fake.paths().len(), 2);
    fake.release();
}

#[tokio::test]
async fn the_key_is_sent_and_never_shown() {
    let fake = FakeEngine::start();
    fake.on("/v1/chat/completions", [Reply::json(401, json!({"error": {"message": "bad key"}}))]);
    let mut options = options(fake.url());
    options.key = Some(SecretString::from("hush-hush"));
    options.dialect = Some(Dialect::Generic);
    options.model = Some("m".to_owned());
    let shown = format!("{options:?}");
    let engine = Engine::connect(options).await.unwrap();
    let error = engine.chat(&one_message()).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized { status: 401, .. }), "{error}");
    assert_eq!(fake.seen()[0].authorization.as_deref(), Some("Bearer hush-hush"));
    assert!(!format!("{shown} {engine:?} {error} {error:?}").contains("hush"));
}

#[tokio::test]
async fn a_wrong_key_is_no_generic_server() {
    let fake = FakeEngine::start();
    let refused = || [Reply::json(401, json!({"error": "Unauthorized"}))];
    for path in ["/model_info", "/version", "/v1/models"] {
        fake.on(path, refused());
    }
    let error = Engine::attach(options(fake.url())).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error}");
    let error = Engine::connect(options(fake.url())).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error}");
    // A gateway that refuses unknown paths, but takes the key.
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "m"}]}))]);
    assert_eq!(Engine::connect(options(fake.url())).await.unwrap().dialect(), Dialect::Generic);
}

#[tokio::test]
async fn a_chat_says_only_what_was_asked() {
    let fake = FakeEngine::start();
    fake.on("/v1/chat/completions", [chat("yo")]);
    let engine = generic(fake.url()).await;
    engine.chat(&one_message()).await.unwrap();
    let mut request = one_message();
    request.tools = Some(vec![json!({"type": "function"})]);
    request.temperature = Some(0.6);
    request.max_tokens = Some(7);
    request.seed = Some(3);
    request.extra.insert("top_p".to_owned(), json!(0.9));
    engine.chat(&request).await.unwrap();
    let messages = json!([{"role": "user", "content": "hi"}]);
    assert_eq!(fake.seen()[0].body, json!({"model": "m", "messages": messages}));
    let whole = json!({
        "model": "m", "messages": messages, "tools": [{"type": "function"}], "temperature": 0.6,
        "max_tokens": 7, "seed": 3, "top_p": 0.9,
    });
    assert_eq!(fake.seen()[1].body, whole);
}

fn scored(start: usize) -> ScoreRequest {
    ScoreRequest { ids: vec![1, 2], start, ..Default::default() }
}

#[tokio::test]
async fn what_a_dialect_cannot_do_is_said_before_it_is_tried() {
    let fake = FakeEngine::start();
    let engine = Engine::attach(options(format!("llamacpp+{}", fake.url()))).await.unwrap();
    let error = engine.score(&scored(1)).await.unwrap_err();
    assert!(error.to_string().contains("speaks the llamacpp dialect"), "{error}");
    assert_eq!(engine.weight_version().await.unwrap(), None);
    assert!(fake.paths().is_empty());
    let fake = FakeEngine::sglang();
    let engine = Engine::attach(options(fake.url())).await.unwrap();
    let error = engine.score(&scored(0)).await.unwrap_err();
    assert_eq!(error.kind(), "client");
    assert!(engine.score(&scored(2)).await.unwrap().log_probs.is_empty());
    assert_eq!(engine.weight_version().await.unwrap().as_deref(), Some("default"));
}
