//! Several servers of one model.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oclaw::engine::{Engine, EngineOptions, Error, News, Pool};
use serde_json::json;

use super::{chat, one_message, options};
use crate::harness::fake_engine::{FakeEngine, Reply};

const CHAT: &str = "/v1/chat/completions";

fn serving(model: &str) -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": model}]}))]);
    fake.on(CHAT, [chat("yo")]);
    fake
}

/// Lets a server be away.
fn leave(fake: &FakeEngine) {
    let away = Reply::json(503, json!({}));
    fake.otherwise(away.clone()).on("/v1/models", [away]);
}

/// Lets it be there again.
fn come_back(fake: &FakeEngine, model: &str) {
    fake.otherwise(Reply::json(404, json!({})));
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": model}]}))]);
    fake.forget();
}

/// Asks until a server hears of it.
async fn ask_until_heard(pool: &Pool, fake: &FakeEngine, path: &str) {
    for _ in 0..10_000 {
        if fake.paths().iter().any(|heard| heard == path) {
            return;
        }
        ask(pool).await.unwrap();
    }
    panic!("nobody asked for {path}");
}

/// An address where nobody listens. A port that was free a moment ago may be a server's
/// of another test by now; these are nobody's.
fn nobody(port: u8) -> String {
    format!("http://127.0.0.1:{port}")
}

struct Heard(Arc<Mutex<Vec<News>>>);

impl Heard {
    fn so_far(&self) -> Vec<News> {
        self.0.lock().unwrap().clone()
    }
}

fn quick(url: impl Into<String>) -> EngineOptions {
    let mut quick = options(url);
    quick.retries.tries = 2;
    quick.retries.first_wait = Duration::from_millis(1);
    quick
}

async fn pool(urls: &[String]) -> (Result<Pool, Error>, Heard) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let tell = heard.clone();
    let tell = Box::new(move |news| tell.lock().unwrap().push(news));
    let options = urls.iter().map(quick).collect();
    (Pool::connect(options, tell).await, Heard(heard))
}

async fn ask(pool: &Pool) -> Result<String, Error> {
    let reply = pool.call(async |engine: &Engine| engine.chat(&one_message()).await).await?;
    Ok(reply.content)
}

fn chats(fake: &FakeEngine) -> usize {
    fake.paths().iter().filter(|path| *path == CHAT).count()
}

#[tokio::test]
async fn a_call_goes_where_the_fewest_are_under_way() {
    let fakes = [serving("m"), serving("m")];
    let (pool, _) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    for _ in 0..4 {
        ask(&pool).await.unwrap();
    }
    assert_eq!(fakes.each_ref().map(chats), [2, 2], "idle ones in turn");
    fakes[0].hold(CHAT);
    let others = async {
        // Whoever waits is not given more.
        for _ in 0..5 {
            ask(&pool).await.unwrap();
        }
        fakes[0].release();
    };
    let (held, ()) = tokio::join!(ask(&pool), others);
    assert_eq!(held.unwrap(), "yo");
    assert_eq!(fakes.each_ref().map(chats), [3, 7]);
    let calls: Vec<_> = pool.accounts().iter().map(|account| account.calls).collect();
    assert_eq!(calls, [3, 7]);
}

#[tokio::test]
async fn a_dead_one_is_left_out_and_told_once() {
    let (fake, dead) = (serving("m"), nobody(1));
    let (pool, heard) = pool(&[dead.clone(), fake.url()]).await;
    let pool = pool.unwrap();
    assert_eq!(pool.model().as_deref(), Some("m"));
    for _ in 0..6 {
        assert_eq!(ask(&pool).await.unwrap(), "yo");
    }
    assert_eq!(chats(&fake), 6);
    let told = heard.so_far();
    assert!(matches!(&told[..], [News::Gone { reason }] if reason.contains(&dead)), "{told:?}");
    assert!(pool.accounts()[0].gone && !pool.accounts()[1].gone && !pool.is_gone());
}

#[tokio::test]
async fn one_that_comes_back_is_asked_again() {
    let fakes = [serving("m"), serving("m")];
    leave(&fakes[0]);
    let (pool, heard) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    ask(&pool).await.unwrap();
    assert_eq!((chats(&fakes[0]), heard.so_far().len()), (0, 1));
    come_back(&fakes[0], "m");
    ask_until_heard(&pool, &fakes[0], CHAT).await;
    let back = News::Back { url: fakes[0].url() };
    assert_eq!(heard.so_far().last(), Some(&back));
    assert_eq!(heard.so_far().len(), 2);
}

#[tokio::test]
async fn one_that_comes_back_as_another_stays_out() {
    let fakes = [serving("m"), serving("m")];
    leave(&fakes[0]);
    let (pool, _) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    come_back(&fakes[0], "other");
    ask_until_heard(&pool, &fakes[0], "/v1/models").await;
    ask(&pool).await.unwrap();
    assert_eq!(chats(&fakes[0]), 0);
}

/// A server of another kind may come late; what it cannot do, another does.
#[tokio::test]
async fn one_of_another_kind_comes_late() {
    let fakes = [FakeEngine::sglang(), serving("m")];
    fakes[0].on(CHAT, [chat("first")]);
    leave(&fakes[1]);
    let (pool, _) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    come_back(&fakes[1], "m");
    ask_until_heard(&pool, &fakes[1], CHAT).await;
    let refuses = async |engine: &Engine| match engine.url() == fakes[0].url() {
        true => {
            let (url, dialect) = (engine.url(), engine.dialect());
            Err(Error::Unsupported { url, dialect, what: "score" })
        }
        false => Ok("other"),
    };
    for _ in 0..3 {
        assert_eq!(pool.call(refuses).await.unwrap(), "other");
    }
}

/// Whose weights were told carries them still when it is away.
#[tokio::test]
async fn who_is_up_does_not_change_the_weights() {
    let mut fakes = vec![FakeEngine::sglang(), serving("m")];
    let (pool, _) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    assert_eq!(pool.weight_version().await.unwrap().as_deref(), Some("default"));
    fakes.remove(0);
    assert_eq!(pool.weight_version().await.unwrap().as_deref(), Some("default"));
}

#[tokio::test]
async fn a_failing_one_costs_no_call_and_rests_after_three() {
    let fakes = [serving("m"), serving("m")];
    fakes[0].on(CHAT, [Reply::json(500, json!({}))]);
    let (pool, heard) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    for _ in 0..3 {
        ask(&pool).await.unwrap();
    }
    // Three calls were tried there, or fewer if the other was idle longer.
    while heard.so_far().is_empty() && chats(&fakes[0]) < 10 {
        ask(&pool).await.unwrap();
    }
    assert_eq!(chats(&fakes[0]), 3);
    assert!(matches!(&heard.so_far()[..], [News::Gone { .. }]));
    assert!(!pool.accounts()[0].gone, "it can be reached");
    assert_eq!(pool.accounts()[0].failed, 3);
}

#[tokio::test]
async fn what_is_said_about_the_question_is_final() {
    let fakes = [serving("m"), serving("m")];
    for fake in &fakes {
        fake.on(CHAT, [Reply::json(400, json!({"error": {"message": "too long"}}))]);
    }
    let (all, _) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let error = ask(&all.unwrap()).await.unwrap_err();
    assert!(matches!(error, Error::Status { status: 400, .. }), "{error}");
    assert_eq!(chats(&fakes[0]) + chats(&fakes[1]), 1);
    // A key that one of them refuses is no word about the question.
    fakes[0].on(CHAT, [Reply::json(401, json!({}))]);
    fakes[1].on(CHAT, [chat("yo")]);
    let (pool, heard) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    for _ in 0..2 {
        assert_eq!(ask(&pool).await.unwrap(), "yo");
    }
    assert_eq!(heard.so_far().len(), 1);
}

#[tokio::test]
async fn all_dead_is_an_error_after_all_tries() {
    let (error, _) = pool(&[nobody(1), nobody(2)]).await;
    assert!(matches!(error.unwrap_err(), Error::Unreachable { .. }));
    let fakes = [serving("m"), serving("m")];
    let (pool, heard) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let pool = pool.unwrap();
    ask(&pool).await.unwrap();
    drop(fakes);
    let error = ask(&pool).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(pool.is_gone());
    let failed: Vec<_> = pool.accounts().iter().map(|account| account.failed).collect();
    assert_eq!(failed, [2, 2], "two rounds");
    assert_eq!(heard.so_far().len(), 2);
}

#[tokio::test]
async fn servers_of_different_models_are_refused() {
    let fakes = [serving("a"), serving("b")];
    let (error, _) = pool(&[fakes[0].url(), fakes[1].url()]).await;
    let error = error.unwrap_err();
    let expected = format!("`{}` serves `b`, but `{}` serves `a`", fakes[1].url(), fakes[0].url());
    assert_eq!((error.to_string(), error.kind()), (expected, "model"));
    // Weights are looked at, too, where they are told.
    let fakes = [FakeEngine::sglang(), FakeEngine::sglang(), serving("m")];
    let urls: Vec<_> = fakes.iter().map(FakeEngine::url).collect();
    let (pool, _) = pool(&urls).await;
    let pool = pool.unwrap();
    let names: Vec<_> = pool.dialects().iter().map(|dialect| dialect.as_str()).collect();
    assert_eq!(names, ["openai", "sglang"]);
    assert_eq!(pool.weight_version().await.unwrap().as_deref(), Some("default"));
    let told = json!({"model_path": "/m", "weight_version": "3"});
    fakes[1].on("/model_info", [Reply::json(200, told)]);
    let error = pool.weight_version().await.unwrap_err();
    assert!(error.to_string().contains("carries the weights `3`, but"), "{error}");
}
