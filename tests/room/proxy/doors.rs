//! Keys, limits and routes.

use oclaw::proxy::Lock;
use oclaw::wire::secret::equal_in_constant_time;

use super::*;

#[tokio::test]
async fn every_route_has_the_lock_and_no_key_crosses() {
    let keys = |names: &[&str]| {
        Keys::new(
            names
                .iter()
                .map(|name| ((*name).to_owned(), SecretString::from(format!("key-of-{name}")))),
        )
    };
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("x")),
        |options| {
            options.keys = keys(&["ann", "bob"]);
            options.control = keys(&["control"]);
            options.engines[0].key = Some(SecretString::from("engine-canary"));
        },
    )
    .await;
    // All there are: the router is made of the same list.
    let known = proxy::routes();
    let mut routes: Vec<_> = known
        .iter()
        .map(|route| (route.method.as_str(), route.path.replace("{*path}", "other"), route.lock))
        .collect();
    routes.push(("GET", "/v1/models".to_owned(), Lock::Client));
    routes.push(("DELETE", "/v1/chat/completions".to_owned(), Lock::Client));
    routes.push(("GET", "/nothing".to_owned(), Lock::Client));
    routes.push(("GET", "/oclaw/pause".to_owned(), Lock::Control));
    let refused = [
        "",
        "Bearer",
        "Bearer ",
        "bearer  ",
        "Basic key-of-ann",
        "key-of-ann",
        "Bearer key-of-anx",
        "Bearer key-of-an",
        "Bearer key-of-ann2",
    ];
    for (method, path, lock) in &routes {
        for value in refused {
            let url = format!("http://{}{path}", rig.running.address);
            let request = rig
                .client
                .request(method.parse().unwrap(), url)
                .body("{}")
                .header("authorization", value);
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 401, "{path} {value:?}");
            assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "invalid_api_key");
        }
        // The control routes have a key of their own; one lock's key opens no other.
        for key in ["key-of-bob", "key-of-control"] {
            let url = format!("http://{}{path}", rig.running.address);
            let request = rig.client.request(method.parse().unwrap(), url).body("{}");
            let status = request.bearer_auth(key).send().await.unwrap().status();
            let opens = (key == "key-of-control") == (*lock == Lock::Control);
            assert_eq!(status != 401, opens, "{path} {key}");
        }
    }
    let wrong = rig.get("/oclaw/pause").bearer_auth("key-of-control").send().await.unwrap();
    assert_eq!(wrong.status(), 405);
    assert!(wrong.json::<Value>().await.unwrap()["error"]["message"].is_string());
    rig.post("/oclaw/resume", &json!({})).bearer_auth("key-of-control").send().await.unwrap();
    // Some of these were chats without messages.
    let before = rig.upstream.chats().len();
    for (name, value) in [
        ("authorization", "bearer key-of-ann"),
        ("x-api-key", "key-of-ann"),
        ("authorization", "Bearer key-of-bob"),
    ] {
        let response = rig
            .chat(&ask("hi"))
            .header(name, value)
            .header("cookie", "c=canary")
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{name} {value}");
    }
    assert_eq!(rig.upstream.chats().len(), before + 3);
    for seen in rig.upstream.seen().iter().filter(|seen| seen.target.starts_with("/v1/")) {
        if seen.target.starts_with("/v1/models") && seen.header("authorization").is_none() {
            // The test's own client asked the engine before the proxy was there.
            continue;
        }
        assert_eq!(seen.header("authorization"), Some("Bearer engine-canary"));
        assert!(
            seen.headers
                .iter()
                .all(|(_, value)| !value.contains("key-of") && !value.contains("c=canary"))
        );
    }
    let mut clients: Vec<_> = rig.rows().await.into_iter().map(|row| row.client.unwrap()).collect();
    clients.sort();
    assert_eq!(clients, ["ann", "ann", "bob"]);
}

/// Keys are compared by one function, and in nothing but these places.
#[test]
fn keys_are_compared_in_constant_time_only() {
    let known = [7; 32];
    assert!(equal_in_constant_time(&known, &known));
    for place in 0..32 {
        let mut given = known;
        given[place] ^= 1;
        assert!(!equal_in_constant_time(&known, &given));
    }
    for file in ["src/proxy/auth.rs", "src/serving/routes.rs", "src/proxy/routes.rs"] {
        let text = std::fs::read_to_string(crate::harness::root().join(file)).unwrap();
        for line in text.lines().filter(|line| line.contains("==") || line.contains("!=")) {
            assert!(!line.contains("key") && !line.contains("digest"), "{file}: {line}");
        }
    }
    // The router has no route beside the table that the test before goes through.
    let text = std::fs::read_to_string(crate::harness::root().join("src/proxy/routes.rs")).unwrap();
    assert_eq!(text.matches(".route(").count(), 2, "both stand in `router`, over the table");
}

#[tokio::test]
async fn a_clients_authorization_crosses_only_if_asked() {
    for forward in [false, true] {
        let rig = Rig::start(
            Speaks::Generic,
            |_| json(200, &answer("x")),
            |options| options.forward_authorization = forward,
        )
        .await;
        rig.chat(&ask("hi")).bearer_auth("sk-mine").send().await.unwrap();
        let expected = forward.then_some("Bearer sk-mine");
        assert_eq!(rig.upstream.chats()[0].header("authorization"), expected);
    }
}

#[tokio::test]
async fn an_open_door_is_refused() {
    let upstream = FakeUpstream::start(Speaks::Generic, |_| json(200, "{}"));
    let folder = tempfile::tempdir().unwrap();
    for keys in [Keys::default(), Keys::new([("a".to_owned(), SecretString::from("  "))])] {
        let mut options = options(&upstream, folder.path()).await;
        options.listen = "0.0.0.0:0".parse().unwrap();
        options.keys = keys;
        assert!(matches!(proxy::start(options).await, Err(Error::Open { .. })));
    }
    let mut options = options(&upstream, folder.path()).await;
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    options.listen = busy.local_addr().unwrap();
    assert!(matches!(proxy::start(options).await, Err(Error::Bind { .. })));
}

#[tokio::test]
async fn large_bodies_pass_up_to_the_limit() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    let limit = 4 << 20;
    let frame = ask("").to_string().len();
    let exact = rig.chat(&ask(&"x".repeat(limit - frame))).send().await.unwrap();
    assert_eq!(exact.status(), 200);
    let over = rig.chat(&ask(&"x".repeat(limit - frame + 1))).send().await.unwrap();
    assert_eq!(over.status(), 413);
    assert_eq!(over.json::<Value>().await.unwrap()["error"]["code"], "body_too_large");
    assert!(rig.metrics().await.contains("oclaw_skipped_total{reason=\"body_too_large\"} 1"));
    let rows = rig.rows().await;
    assert_eq!((rows.len(), rows[0].messages.len() > 4_000_000), (1, true));
}

#[tokio::test]
async fn other_routes_are_passed_on_and_none_climbs_out() {
    let script =
        |seen: &Seen| json(207, &format!("{} {} {}", seen.method, seen.target, seen.text()));
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let response =
        rig.post("/v1/embeddings?x=1&y=%20", &json!({"input": "a"})).send().await.unwrap();
    assert_eq!(response.status(), 207);
    assert_eq!(response.text().await.unwrap(), "POST /v1/embeddings?x=1&y=%20 {\"input\":\"a\"}");
    let models = rig.get("/v1/models").send().await.unwrap().text().await.unwrap();
    assert!(models.contains("\"m1\""));
    for path in ["/nothing", "/oclaw/other", "/model_info"] {
        assert_eq!(rig.get(path).send().await.unwrap().status(), 404, "{path}");
    }
    // A library would tidy this path up; a hostile client does not use one.
    for path in [
        "/v1/../model_info",
        "/v1/%2e%2e/model_info",
        "/v1/x/%2E./%2e./model_info",
        "/v1/..%2fmodel_info",
    ] {
        let status = raw(&rig, path).await;
        assert!(status.starts_with("HTTP/1.1 404"), "{path} {status}");
    }
    assert!(rig.get("/v1/chat/completions").send().await.unwrap().status() == 405);
    assert!(rig.rows().await.is_empty());
}

async fn raw(rig: &Rig, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(rig.running.address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}
