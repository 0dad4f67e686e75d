//! Several engines behind one proxy, and the name of the model.

use oclaw::proxy::Names;

use super::*;

/// Two engines that say who they are.
struct Pair {
    rig: Rig,
    other: FakeUpstream,
}

fn named(name: &'static str) -> impl Fn(&Seen) -> Vec<Step> + Send + std::marker::Sync {
    move |_| json(200, &answer(name))
}

impl Pair {
    async fn start(change: impl FnOnce(&mut Options)) -> Self {
        let other = FakeUpstream::start(Speaks::Sglang, named("two"));
        let second = backend(&other).await;
        let rig = Rig::start(Speaks::Sglang, named("one"), |options| {
            options.engines.push(second);
            change(options);
        })
        .await;
        Self { rig, other }
    }

    /// Asks something in a session. Returns the status and who answered.
    async fn ask(&self, session: &str) -> (u16, String) {
        let request = self.rig.chat(&ask("hi")).header("x-session-id", session);
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        let who = body["choices"][0]["message"]["content"].as_str().unwrap_or_default();
        (status, who.to_owned())
    }

    async fn control(&self, path: &str, body: &Value) -> u16 {
        self.rig.post(path, body).send().await.unwrap().status().as_u16()
    }

    async fn until_metric(&self, line: &str) {
        let look = async {
            while !self.rig.metrics().await.contains(line) {
                tokio::task::yield_now().await;
            }
        };
        let seen = tokio::time::timeout(Duration::from_secs(20), look).await;
        assert!(seen.is_ok(), "no metric `{line}`");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_stay_and_new_ones_go_where_least_is_to_do() {
    let gate = Gate::default();
    let held = gate.clone();
    let other = FakeUpstream::start(Speaks::Sglang, named("two"));
    let second = backend(&other).await;
    let script = move |seen: &Seen| {
        let mut steps = json(200, &answer("one"));
        if seen.text().contains("long") {
            steps.insert(1, Step::Hold(held.clone()));
        }
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |options| options.engines.push(second)).await;
    // The first engine is busy with this one for as long as the test lasts.
    let long = tokio::spawn(rig.chat(&ask("long")).header("x-session-id", "l").send());
    rig.upstream.wait(|seen| seen.iter().any(Seen::is_chat));
    let pair = Pair { rig, other };
    for session in ["a", "b", "a", "c", "b", "a"] {
        assert_eq!(pair.ask(session).await, (200, "two".to_owned()), "{session}");
    }
    gate.open();
    assert_eq!(long.await.unwrap().unwrap().status(), 200);
    // The second one has had more to do, but its sessions are at home there.
    assert_eq!(pair.ask("a").await.1, "two");
    assert_eq!(pair.ask("l").await.1, "one");
    assert_eq!(pair.ask("new").await.1, "one");
    let metrics = pair.rig.metrics().await;
    for (url, requests) in [(pair.rig.upstream.url(), 3), (pair.other.url(), 7)] {
        for (name, value) in
            [("requests_total", requests), ("running_requests", 0), ("up", 1), ("held", 0)]
        {
            let line = format!("oclaw_engine_{name}{{engine=\"{url}\"}} {value}\n");
            assert!(metrics.contains(&line), "{line}{metrics}");
        }
    }
}

#[tokio::test]
async fn an_engine_that_is_away_is_left_out_until_it_is_back() {
    let pair = Pair::start(|options| options.limits.health = Duration::from_secs(3600)).await;
    assert_eq!(pair.ask("a").await, (200, "one".to_owned()));
    pair.rig.upstream.stop();
    // Nothing of the request has reached the first, so the second gets it.
    for session in ["a", "b", "a"] {
        assert_eq!(pair.ask(session).await, (200, "two".to_owned()), "{session}");
    }
    let metrics = pair.rig.metrics().await;
    let url = pair.rig.upstream.url();
    assert!(metrics.contains(&format!("engine_up{{engine=\"{url}\"}} 0")), "{metrics}");
    assert!(metrics.contains(&format!("engine_failures_total{{engine=\"{url}\"}} 1")), "{metrics}");
    assert_eq!(pair.rig.get("/readyz").send().await.unwrap().status(), 200);
    pair.other.stop();
    assert_eq!(pair.ask("c").await.0, 502);
    let ready = pair.rig.get("/readyz").send().await.unwrap();
    assert_eq!(ready.status(), 503);
    let told: Value = serde_json::from_str(&ready.text().await.unwrap()).unwrap();
    assert_eq!(told["reasons"].as_array().unwrap().len(), 2, "{told}");
    assert_eq!(pair.rig.rows().await.len(), 4);
}

#[tokio::test]
async fn the_health_of_engines_is_watched() {
    let pair = Pair::start(|_| {}).await;
    pair.other.stop();
    let url = pair.other.url();
    pair.until_metric(&format!("engine_up{{engine=\"{url}\"}} 0")).await;
    for session in ["a", "b", "c", "d"] {
        assert_eq!(pair.ask(session).await, (200, "one".to_owned()));
    }
    assert!(pair.other.chats().is_empty());
}

#[tokio::test]
async fn a_request_that_has_reached_an_engine_goes_to_no_other() {
    let other = FakeUpstream::start(Speaks::Sglang, named("two"));
    let second = backend(&other).await;
    // It takes the request and breaks off, each time.
    let script = |_: &Seen| vec![Step::Break];
    let rig = Rig::start(Speaks::Sglang, script, |options| options.engines.push(second)).await;
    let pair = Pair { rig, other };
    let (status, _) = pair.ask("a").await;
    assert_eq!((status, pair.other.chats().len()), (502, 0));
}

#[tokio::test]
async fn one_engine_may_be_on_hold_while_the_other_answers() {
    let pair = Pair::start(|options| options.limits.hold = Duration::from_millis(20)).await;
    assert_eq!(pair.ask("a").await.1, "one");
    let one = json!({"engine": format!("{}/v1/", pair.rig.upstream.url())});
    assert_eq!(pair.control("/oclaw/pause", &one).await, 200);
    // Its session is away from home for as long as that lasts.
    assert_eq!(pair.ask("a").await, (200, "two".to_owned()));
    assert_eq!(pair.rig.get("/readyz").send().await.unwrap().status(), 200);
    let two = json!({"engine": format!("sglang+{}", pair.other.url())});
    assert_eq!(pair.control("/oclaw/pause", &two).await, 200);
    assert_eq!(pair.ask("a").await.0, 503);
    assert_eq!(pair.rig.get("/readyz").send().await.unwrap().status(), 503);
    // What is no chat waits, too, unless it only asks.
    let passed = pair.rig.post("/v1/completions", &json!({"prompt": "x"})).send().await.unwrap();
    assert_eq!(passed.status(), 503);
    assert_eq!(pair.rig.get("/v1/models").send().await.unwrap().status(), 200);
    assert_eq!(pair.control("/oclaw/resume", &one).await, 200);
    assert_eq!(pair.ask("a").await.1, "one");
    assert_eq!(pair.control("/oclaw/resume", &Value::Null).await, 200);
    let stranger = json!({"engine": "http://127.0.0.1:1"});
    for path in ["/oclaw/pause", "/oclaw/resume"] {
        assert_eq!(pair.control(path, &stranger).await, 404);
    }
}

/// The one that could answer is on hold, the other away: there is nothing but to wait.
#[tokio::test]
async fn an_engine_on_hold_is_left_alone_while_the_other_is_away() {
    let pair = Pair::start(|options| options.limits.hold = Duration::from_millis(20)).await;
    let one = json!({"engine": pair.rig.upstream.url()});
    assert_eq!(pair.control("/oclaw/pause", &one).await, 200);
    pair.other.stop();
    for session in ["a", "b"] {
        assert!(pair.ask(session).await.0 >= 502);
    }
    let url = pair.other.url();
    pair.until_metric(&format!("engine_up{{engine=\"{url}\"}} 0")).await;
    assert_eq!(pair.ask("c").await.0, 503);
    assert!(pair.rig.upstream.chats().is_empty());
    assert_eq!(pair.control("/oclaw/resume", &one).await, 200);
    assert_eq!(pair.ask("c").await, (200, "one".to_owned()));
}

#[tokio::test]
async fn each_engine_has_its_own_weights() {
    let other = FakeUpstream::start(Speaks::Generic, |_| json(200, &bare_answer("two")));
    let second = backend(&other).await;
    let one = |_: &Seen| json(200, &bare_answer("one"));
    let rig = Rig::start(Speaks::Generic, one, |options| options.engines.push(second)).await;
    let pair = Pair { rig, other };
    let told = |version: &str, url: &str| json!({"weight_version": version, "engine": url});
    let two = told("8", &pair.other.url());
    assert_eq!(pair.control("/oclaw/policy", &json!({"weight_version": "7"})).await, 200);
    assert_eq!(pair.control("/oclaw/policy", &two).await, 200);
    assert_eq!(pair.control("/oclaw/policy", &told("9", "http://nowhere")).await, 404);
    pair.ask("a").await;
    pair.ask("b").await;
    let mut found: Vec<_> = pair
        .rig
        .rows()
        .await
        .into_iter()
        .map(|row| (row.response.contains("one"), row.weight_version.unwrap()))
        .collect();
    found.sort();
    assert_eq!(found, [(false, "8".to_owned()), (true, "7".to_owned())]);
}

fn bare_answer(text: &str) -> String {
    json!({"id": "a", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}).to_string()
}

fn names() -> Names {
    Names { public: "our-model".to_owned(), engine: "Qwen/Qwen3-8B".to_owned() }
}

/// Answers with the model's name as the engine knows it.
fn with_model(seen: &Seen) -> Vec<Step> {
    let model = r#""model" : "Qwen\/Qwen3-8B""#;
    let event = |rest: &str| Step::Send(format!("data: {{{model},{rest}}}\n\n").into_bytes());
    match (seen.target.as_str(), seen.text().contains("\"stream\":true")) {
        (_, true) => vec![
            stream_head(),
            event(r#""choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]"#),
            event(r#""choices":[{"index":0,"delta":{},"finish_reason":"stop"}]"#),
            done(),
            Step::End,
        ],
        _ => json(
            200,
            &format!(
                r#"{{{model},"choices":[{{"index":0,"message":{{"role":"assistant","content":"Qwen/Qwen3-8B"}},"finish_reason":"stop"}}]}}"#
            ),
        ),
    }
}

#[tokio::test]
async fn the_models_name_is_changed_there_and_back() {
    let rig = Rig::start(Speaks::Generic, with_model, |options| {
        options.engines[0].names = Some(names());
    })
    .await;
    let request = |name: &str, stream: bool| json!({"model": name, "messages": [user("Qwen/Qwen3-8B?")], "stream": stream});
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for stream in [true, false] {
            let response = rig.post(path, &request("our-model", stream)).send().await.unwrap();
            let text = response.text().await.unwrap();
            assert!(text.contains(r#""model" : "our-model""#), "{path} {text}");
            assert!(!text.contains(r"Qwen\/"), "{path} {text}");
            assert!(stream || text.contains(r#""content":"Qwen/Qwen3-8B""#), "{path} {text}");
            // Another name is the engine's business.
            let response = rig.post(path, &request("other", stream)).send().await.unwrap();
            assert!(response.text().await.unwrap().contains(r"Qwen\/"), "{path}");
        }
    }
    // So with what is not recorded.
    let side = rig.chat(&request("our-model", true)).header("x-turn-type", "side");
    assert!(side.send().await.unwrap().text().await.unwrap().contains("\"our-model\""));
    let posted: Vec<_> =
        rig.upstream.seen().into_iter().filter(|seen| seen.method == "POST").collect();
    let asked: Vec<_> = posted
        .iter()
        .map(|seen| {
            let body: Value = serde_json::from_slice(&seen.body).unwrap();
            assert_eq!(body["messages"][0]["content"], "Qwen/Qwen3-8B?");
            body["model"].as_str().unwrap().to_owned()
        })
        .collect();
    let pair = ["Qwen/Qwen3-8B", "other"];
    assert_eq!(
        asked,
        [pair, pair, pair, pair].concat().into_iter().chain([pair[0]]).collect::<Vec<_>>()
    );
    let rows = rig.rows().await;
    assert_eq!(rows.iter().filter(|row| row.model == "our-model").count(), 2);
}

#[tokio::test]
async fn the_list_of_models_has_the_public_name_and_new_weights_may_have_a_new_one() {
    let rig = Rig::start(Speaks::Generic, with_model, |options| {
        options.engines[0].names =
            Some(Names { public: "our-model".to_owned(), engine: "m1".to_owned() });
    })
    .await;
    for path in ["/v1/models", "/models"] {
        let list = rig.get(path).send().await.unwrap();
        assert_eq!(
            list.text().await.unwrap(),
            r#"{"object":"list","data":[{"id":"our-model","object":"model","created":1,"owned_by":"x"}]}"#
        );
    }
    let told = json!({"weight_version": "3", "model": "policy-3"});
    assert_eq!(rig.post("/oclaw/policy", &told).send().await.unwrap().status(), 200);
    let body = json!({"model": "our-model", "messages": [user("hi")]});
    rig.chat(&body).send().await.unwrap();
    assert!(rig.upstream.chats()[0].text().contains(r#""model":"policy-3""#));
}
