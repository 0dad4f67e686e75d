//! Every call of a push, failing in every way.

use super::*;

/// How a call goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Fails,
    Busy,
    AnswersWrong,
    Breaks,
    /// No answer comes.
    Hangs,
    /// Neither this call nor any after it is answered.
    Dies,
}

const FAULTS: [Fault; 6] =
    [Fault::Fails, Fault::Busy, Fault::AnswersWrong, Fault::Breaks, Fault::Hangs, Fault::Dies];

/// What the errors of the calls in `WHOLE` begin with.
const STEPS: [&str; 7] = [
    "asking for the version failed: ",
    "pause failed: ",
    "update failed: ",
    "version check failed: ",
    "flush failed: ",
    "continue failed: ",
    "health check failed: ",
];

/// An answer that has the form of a good one, or nearly, and says something else.
fn wrong(place: usize) -> Reply {
    let no = json!({"success": false, "message": "failed to update parameter"});
    match place {
        0 => Reply::json(200, json!([])),
        2 => Reply::json(200, json!({"message": "ok"})),
        3 => Reply::json(200, json!({"model_path": "/m", "weight_version": "6"})),
        6 => Reply::text(503, "is held"),
        _ => Reply::json(200, no),
    }
}

fn inflict(fake: &FakeEngine, place: usize, fault: Fault) {
    let path = WHOLE[place];
    // The version is asked for twice.
    let before = WHOLE[..place].iter().filter(|before| **before == path).count();
    let good = Reply::json(200, json!({"model_path": "/m", "weight_version": "default"}));
    let reply = match fault {
        Fault::Fails => Reply::json(500, json!({"message": "boom"})),
        Fault::Busy => Reply::text(503, "not now"),
        Fault::AnswersWrong => wrong(place),
        Fault::Breaks => Reply::broken(),
        Fault::Hangs => return fake.hold_after(path, before),
        Fault::Dies => return fake.die_after(path, before),
    };
    let replies = std::iter::repeat_n(good, before).chain([reply]);
    fake.on(path, replies);
}

async fn attached(fake: &FakeEngine, tries: u32, patience: Duration) -> Engine {
    let mut options = EngineOptions::new(fake.url());
    options.timeout = patience;
    options.retries = Retries { tries, first_wait: Duration::from_millis(1), ..Retries::default() };
    Engine::attach(options).await.unwrap()
}

/// What failed once can be done.
async fn healed(fake: &FakeEngine, policy: &Policy, shown: &str) {
    fake.heal();
    let engine = attached(fake, 1, Duration::from_secs(20)).await;
    fake.forget();
    let again = Options { force: true };
    let outcome = sync::push(policy, &[engine], &[], again, &|_| {}).await;
    assert_eq!(outcome.unwrap(), 1, "{shown}");
    assert_eq!(fake.paths(), WHOLE, "{shown}");
    assert_eq!(fake.version().as_deref(), Some("7"), "{shown}");
}

#[tokio::test]
async fn whatever_fails_wherever_generation_goes_on_and_the_push_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    let proxy = FakeEngine::start();
    for (place, step) in STEPS.into_iter().enumerate() {
        for fault in FAULTS {
            let shown = format!("{fault:?} at {place}");
            let fake = FakeEngine::sglang();
            let patience = match fault {
                Fault::Hangs => Duration::from_secs(1),
                _ => Duration::from_secs(20),
            };
            let engine = attached(&fake, 1, patience).await;
            let options = EngineOptions::new(format!("openai+{}", proxy.url()));
            let told = Engine::attach(options).await.unwrap();
            fake.forget();
            inflict(&fake, place, fault);
            let (engines, proxies) = ([engine], [told]);
            let options = Options::default();
            let outcome = sync::push(&policy, &engines, &proxies, options, &|_| {}).await;
            let message = outcome.unwrap_err().to_string();
            match (place, fault) {
                (3, Fault::AnswersWrong) => assert!(
                    message.ends_with("carries version `6` after loading version `7`"),
                    "{shown}: {message}"
                ),
                _ => assert!(message.starts_with(step), "{shown}: {message}"),
            }
            let count = |path: &str| fake.paths().iter().filter(|seen| *seen == path).count();
            assert_eq!(count("/pause_generation"), usize::from(place > 0), "{shown}");
            assert_eq!(count("/update_weights_from_disk"), usize::from(place > 1), "{shown}");
            assert_eq!(count("/flush_cache"), usize::from(place > 3), "{shown}");
            // Wherever it may be held, it is told to go on, and that is the last
            // word about its weights.
            assert_eq!(count("/continue_generation"), usize::from(place > 0), "{shown}");
            assert_eq!(proxy.paths(), [""; 0], "{shown}");
            if place < 2 {
                assert_eq!(fake.version().as_deref(), Some("default"), "{shown}");
            }

            healed(&fake, &policy, &shown).await;
        }
    }
}

#[tokio::test]
async fn what_passes_is_tried_again_and_what_stays_so_often_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Policy::resolve(&policy_in(folder.path(), "step-000007"), None).unwrap();
    for path in
        ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]
    {
        let fake = FakeEngine::sglang();
        let engine = [attached(&fake, 3, Duration::from_secs(20)).await];
        let good = Reply::json(200, json!({"success": true, "message": "ok"}));
        fake.on(
            "/model_info",
            [
                Reply::json(200, json!({"model_path": "/m", "weight_version": "6"})),
                Reply::json(200, json!({"model_path": "/m", "weight_version": "7"})),
            ],
        );
        fake.on(path, [Reply::text(503, "not now"), Reply::broken(), good]);
        fake.forget();
        let outcome = sync::push(&policy, &engine, &[], Options::default(), &|_| {}).await;
        assert_eq!(outcome.unwrap(), 1, "{path}");
        let count = || fake.paths().iter().filter(|seen| *seen == path).count();
        assert_eq!(count(), 3, "{path}");

        fake.on(path, [Reply::text(503, "not now")]).forget();
        let again = Options { force: true };
        sync::push(&policy, &engine, &[], again, &|_| {}).await.unwrap_err();
        assert_eq!(count(), 3, "{path}");
    }
}
