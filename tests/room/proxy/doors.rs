//! Keys, limits and routes.

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
            options.engine_key = Some(SecretString::from("engine-canary"));
        },
    )
    .await;
    let routes = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/feedback"),
        ("GET", "/v1/models"),
        ("GET", "/v1/other"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
        ("POST", "/oclaw/policy"),
        ("POST", "/oclaw/pause"),
        ("POST", "/oclaw/resume"),
        ("GET", "/nothing"),
    ];
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
    for (method, path) in routes {
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
    }
    // The control routes have a key of their own.
    let pause = |key: &str| rig.post("/oclaw/resume", &json!({})).bearer_auth(key).send();
    assert_eq!(pause("key-of-ann").await.unwrap().status(), 401);
    assert_eq!(pause("key-of-control").await.unwrap().status(), 200);
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
    for seen in rig.upstream.seen().iter().filter(|seen| seen.target.starts_with("/v1/chat")) {
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
