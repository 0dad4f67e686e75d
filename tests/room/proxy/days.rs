//! What happens to a server in its days: new weights, pauses, restarts, many at once.

use super::*;

#[tokio::test]
async fn weights_change_under_running_chats() {
    let (gate, script) = held_stream();
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    until(&mut response, "\"a\"").await;
    rig.upstream.set_version("8");
    let told = rig
        .post("/oclaw/policy", &json!({"weight_version": "8", "model_path": "/x"}))
        .send()
        .await
        .unwrap();
    assert_eq!(told.json::<Value>().await.unwrap()["success"], true);
    assert_eq!(
        rig.post("/oclaw/policy", &json!({"weight_version": 8})).send().await.unwrap().status(),
        400
    );
    gate.open();
    response.text().await.unwrap();
    let rows = rig.rows().await;
    assert_eq!(
        (rows[0].weight_version.as_deref(), rows[0].weight_version_end.as_deref()),
        (Some("7"), Some("8"))
    );
}

#[tokio::test]
async fn chats_wait_while_the_engine_is_on_hold() {
    let rig = Rig::start(Speaks::Sglang, |_| json(200, &answer("x")), |_| {}).await;
    rig.post("/oclaw/pause", &json!({})).send().await.unwrap();
    assert_eq!(rig.get("/readyz").send().await.unwrap().status(), 503);
    let waiting = tokio::spawn(rig.chat(&ask("hi")).send());
    tokio::task::yield_now().await;
    assert!(rig.upstream.chats().is_empty());
    rig.post("/oclaw/resume", &json!({})).send().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("x")),
        |options| options.limits.hold = Duration::from_millis(10),
    )
    .await;
    rig.post("/oclaw/pause", &json!({})).send().await.unwrap();
    let refused = rig.chat(&ask("hi")).send().await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), refused.headers()["retry-after"].to_str().unwrap()),
        (503, "5")
    );
}

#[tokio::test]
async fn a_stale_connection_is_tried_once_more_and_only_then() {
    let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = calls.clone();
    let script = move |seen: &Seen| {
        let call = counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        match (seen.text().contains("begun"), call) {
            // Broken before a byte of the answer; then it works.
            (false, 0) => vec![Step::Break],
            (false, _) => json(200, &answer("x")),
            (true, _) => vec![
                Step::Head(200, vec![("content-type", "application/json".to_owned())]),
                Step::Send(b"{".to_vec()),
                Step::Break,
            ],
        }
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    assert_eq!(rig.chat(&ask("hi")).send().await.unwrap().status(), 200);
    assert_eq!(rig.upstream.chats().len(), 2);
    let begun = rig.chat(&ask("begun")).send().await.unwrap();
    assert_eq!(begun.status(), 502);
    assert_eq!(rig.upstream.chats().len(), 3);
    assert_eq!(rig.rows().await.len(), 1);
}

#[tokio::test]
async fn many_at_once_keep_their_own_words() {
    let script = |seen: &Seen| {
        let asked: Value = serde_json::from_slice(&seen.body).unwrap();
        let name = asked["messages"][0]["content"].as_str().unwrap().to_owned();
        let number: f64 = name.parse().unwrap();
        let mut steps = vec![stream_head()];
        for _ in 0..5 {
            steps.push(event(&delta(&name, -number)));
        }
        let token = number as i32;
        let ids = json!({"choices": [], "sglext": {"input_ids": [token], "output_ids": [[token, token, token, token, token]]}});
        steps.extend([
            event(&finish()),
            event(&ids),
            event(&json!({"choices": [], "usage": {"completion_tokens": 5}})),
            done(),
            Step::End,
        ]);
        steps
    };
    let rig = Arc::new(Rig::start(Speaks::Sglang, script, |_| {}).await);
    let mut talks = Vec::new();
    for number in 1..=100 {
        let rig = rig.clone();
        talks.push(tokio::spawn(async move {
            let name = number.to_string();
            let text = rig.chat(&ask_stream(&name)).send().await.unwrap().text().await.unwrap();
            let one = format!("data: {}\n\n", bare(&name));
            assert_eq!(text, format!("{}data: {}\n\ndata: [DONE]\n\n", one.repeat(5), finish()));
        }));
    }
    for talk in talks {
        talk.await.unwrap();
    }
    let rows = Arc::into_inner(rig).unwrap().rows().await;
    assert_eq!(rows.len(), 100);
    for row in rows {
        let name = row.prompt_ids.as_ref().unwrap()[0];
        assert_eq!(row.response_ids, Some(vec![name; 5]));
        assert_eq!(row.rollout_log_probs, Some(vec![Some(-(name as f32)); 5]));
        assert_eq!(row.response, said(&name.to_string().repeat(5)).to_string());
        assert_eq!(row.untrainable_reason, None);
    }
}

#[tokio::test]
async fn a_restart_goes_on_with_open_conversations() {
    let rig = Rig::start(
        Speaks::Sglang,
        |_| json(200, &answer("a1")),
        |options| options.flush_open = false,
    )
    .await;
    rig.chat(&ask("first")).send().await.unwrap().text().await.unwrap();
    let Rig { upstream, running, client, folder } = rig;
    let summary = running.shutdown().await.unwrap();
    assert_eq!((summary.turns, summary.rows, summary.open, summary.no_session), (1, 0, 1, 1));
    let options = options(&upstream, folder.path()).await;
    let running = proxy::start(options).await.unwrap();
    let rig = Rig { upstream, running, client, folder };
    let next = json!({"model": "m1", "messages": [user("first"), said("a1"), user("second")]});
    rig.chat(&next).send().await.unwrap().text().await.unwrap();
    let rows = rig.rows().await;
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].next_state.as_deref(), Some(r#"[{"role":"user","content":"second"}]"#));
    assert_eq!((rows[1].turn, rows[1].session_source), (2, SessionSource::Inferred));
    assert_eq!(rows[1].session_id, rows[0].session_id);
}

#[tokio::test]
async fn shutdown_waits_for_answers_up_to_its_limit() {
    let (gate, script) = held_stream();
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    until(&mut response, "\"a\"").await;
    let Rig { running, folder, .. } = rig;
    let ending = tokio::spawn(running.shutdown());
    tokio::task::yield_now().await;
    gate.open();
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(ending.await.unwrap().unwrap().rows, 1);
    assert_eq!(rows(folder.path())[0].status, Status::Complete);
    // An answer that takes too long is cut off and recorded as far as it came.
    let script = |_: &Seen| vec![stream_head(), event(&delta("a", -0.5)), Step::UntilClosed];
    let rig = Rig::start(Speaks::Sglang, script, |options| {
        options.limits.drain = Duration::from_millis(10)
    })
    .await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    until(&mut response, "\"a\"").await;
    let rows = rig.rows().await;
    assert_eq!(rows[0].status, Status::Aborted);
    assert!(response.chunk().await.is_err());
}
