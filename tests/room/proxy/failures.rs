//! What the engine, or a client, does wrong on the way.

use super::*;

#[tokio::test]
async fn statuses_headers_and_bodies_of_the_engine_survive() {
    let script = |seen: &Seen| {
        let asked: Value = serde_json::from_slice(&seen.body).unwrap();
        let headers = vec![
            ("content-type", "application/json".to_owned()),
            ("retry-after", "17".to_owned()),
            ("x-ratelimit-remaining", "0".to_owned()),
            ("connection", "x-private".to_owned()),
            ("x-private", "y".to_owned()),
        ];
        let body = asked["messages"][0]["content"].as_str().unwrap().to_owned();
        vec![
            Step::Head(asked["status"].as_u64().unwrap() as u16, headers),
            Step::Send(body.into_bytes()),
            Step::End,
        ]
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    for status in [400, 401, 404, 422, 429, 500, 503, 529] {
        for stream in [true, false] {
            for body in [
                "{\"object\":\"error\",\"message\":\"x\"}",
                "{\"error\":{\"message\":\"y\"}}\n",
                "",
            ] {
                let request = json!({"status": status, "stream": stream, "messages": [user(body)]});
                let response = rig.chat(&request).send().await.unwrap();
                assert_eq!(response.status(), status);
                assert_eq!(response.headers()["retry-after"], "17");
                assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
                assert!(!response.headers().contains_key("x-private"));
                assert_eq!(response.text().await.unwrap(), body);
            }
        }
    }
    let metrics = rig.metrics().await;
    assert!(metrics.contains("oclaw_skipped_total{reason=\"upstream_429\"} 6"), "{metrics}");
    assert!(rig.rows().await.is_empty());
}

#[tokio::test]
async fn an_engine_that_is_away_is_a_clear_error() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    rig.upstream.stop();
    for body in [ask("hi"), ask_stream("hi")] {
        let response = rig.chat(&body).send().await.unwrap();
        assert_eq!(response.status(), 502);
        let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        assert_eq!(error["error"]["code"], "upstream_unreachable");
        assert!(!error.to_string().contains("127.0.0.1"));
    }
    let ready = rig.get("/readyz").send().await.unwrap();
    assert_eq!(ready.status(), 503);
    assert_eq!(rig.get("/healthz").send().await.unwrap().status(), 200);
    assert!(rig.rows().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_ends_the_engine_too() {
    let script = |seen: &Seen| {
        let mut steps = vec![stream_head(), event(&delta("a", -0.5))];
        if seen.text().contains("whole") {
            steps.push(event(&finish()));
        }
        if seen.text().contains("silent") {
            steps.clear();
        }
        steps.push(Step::UntilClosed);
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut half = rig.chat(&ask_stream("half")).send().await.unwrap();
    until(&mut half, "\"a\"").await;
    drop(half);
    rig.upstream.wait_for_hang_ups(1);
    let mut whole = rig.chat(&ask_stream("whole")).send().await.unwrap();
    until(&mut whole, "finish_reason\":\"stop").await;
    drop(whole);
    rig.upstream.wait_for_hang_ups(2);
    // Before the engine has said a word.
    let silent = tokio::spawn(rig.chat(&ask_stream("silent")).send());
    rig.upstream.wait(|seen| seen.iter().filter(|seen| seen.is_chat()).count() == 3);
    silent.abort();
    rig.upstream.wait_for_hang_ups(3);
    let rows = rig.rows().await;
    let found: Vec<_> =
        rows.iter().map(|row| (row.status, row.untrainable_reason.as_deref())).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.contains(&(Status::Aborted, Some("aborted"))), "{found:?}");
    assert!(found.contains(&(Status::Complete, Some("no_token_ids"))), "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_breaks_and_a_silent_one_ends() {
    let script = |seen: &Seen| {
        let mut steps = vec![stream_head(), event(&delta("a", -0.5))];
        steps.push(if seen.text().contains("break") { Step::Break } else { Step::UntilClosed });
        steps
    };
    let rig = Rig::start(Speaks::Sglang, script, |options| {
        options.limits.silence = Duration::from_millis(200)
    })
    .await;
    for text in ["break", "silent"] {
        let response = rig.chat(&ask_stream(text)).send().await.unwrap();
        let pieces: Vec<_> = response.bytes_stream().collect().await;
        assert!(pieces.last().unwrap().is_err(), "{text}");
    }
    rig.upstream.wait_for_hang_ups(1);
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!(
            (row.status, row.untrainable_reason.as_deref()),
            (Status::Failed, Some("incomplete_stream"))
        );
    }
}

#[tokio::test]
async fn a_whole_answer_needs_no_end_mark() {
    let script = |_: &Seen| vec![stream_head(), event(&bare("a")), event(&finish()), Step::End];
    let rig = Rig::start(Speaks::Generic, script, |_| {}).await;
    let text = rig.chat(&ask_stream("x")).send().await.unwrap().text().await.unwrap();
    assert_eq!(text, format!("data: {}\n\ndata: {}\n\n", bare("a"), finish()));
    let rows = rig.rows().await;
    assert_eq!(
        (rows[0].status, rows[0].untrainable_reason.as_deref()),
        (Status::Complete, Some("no_token_ids"))
    );
    assert_eq!(
        (rows[0].token_source, rows[0].sampling.log_prob_kind),
        (TokenSource::None, LogProbKind::Unknown)
    );
}
