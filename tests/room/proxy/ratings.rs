//! `reward` and `feedback` in the next request.

use super::*;

fn second(rating: Value) -> Value {
    let mut request =
        json!({"model": "m1", "messages": [user("first"), said("a1"), user("second")]});
    for (name, value) in rating.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

async fn rig() -> Rig {
    let script = |_: &Seen| json(200, &answer("a1"));
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    rig.chat(&ask("first")).send().await.unwrap().text().await.unwrap();
    rig
}

/// Returns what the header says and what became of the first turn.
async fn rated(rating: Value) -> (Option<String>, Option<f32>, Option<String>, String) {
    let rig = rig().await;
    let response = rig.chat(&second(rating)).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let told = response.headers().get("x-oclaw-feedback");
    let told = told.map(|told| told.to_str().unwrap().to_owned());
    response.text().await.unwrap();
    // Ours alone: the engine never sees it.
    let sent = rig.upstream.chats()[1].text();
    assert!(!sent.contains("reward") && !sent.contains("feedback"), "{sent}");
    let metrics = rig.metrics().await;
    let rows = rig.rows().await;
    let first = rows.iter().find(|row| row.turn == 1).unwrap();
    assert_eq!(first.next_state.as_deref(), Some(r#"[{"role":"user","content":"second"}]"#));
    assert_eq!(first.next_state_kind, NextStateKind::User);
    (told, first.reward_explicit, first.feedback_text.clone(), metrics)
}

#[tokio::test]
async fn a_rating_in_the_next_request_is_that_of_the_answer_before() {
    let (told, reward, text, metrics) =
        rated(json!({"reward": -0.5, "feedback": "too long"})).await;
    assert_eq!((told.as_deref(), reward), (Some("taken"), Some(-0.5)));
    assert_eq!(text.as_deref(), Some("too long"));
    assert!(metrics.contains("oclaw_feedback_total 1\n"), "{metrics}");
    let (told, reward, text, _) = rated(json!({"reward": 1, "feedback": null})).await;
    assert_eq!((told.as_deref(), reward, text), (Some("taken"), Some(1.0), None));
    let (told, reward, text, _) = rated(json!({"reward": null, "feedback": " "})).await;
    assert_eq!((told, reward, text), (None, None, None));
}

#[tokio::test]
async fn a_rating_that_is_none_is_counted_and_no_reason_to_refuse_a_chat() {
    for rating in [
        json!({"reward": 1.5}),
        json!({"reward": "good"}),
        json!({"reward": [1]}),
        json!({"feedback": 7}),
    ] {
        let (told, reward, text, metrics) = rated(rating.clone()).await;
        assert_eq!((told.as_deref(), reward, text), (Some("ignored"), None, None), "{rating}");
        assert!(metrics.contains("oclaw_odd_feedback_total 1\n"), "{metrics}");
    }
    let (told, reward, text, _) = rated(json!({"reward": 9, "feedback": "words"})).await;
    assert_eq!((told.as_deref(), reward), (Some("partly"), None));
    assert_eq!(text.as_deref(), Some("words"));
}

#[tokio::test]
async fn a_rating_finds_its_turn_through_the_session_or_is_counted() {
    let script = |_: &Seen| json(200, &answer("a1"));
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let send = async |body: &Value, session: &str, kind: &str| {
        let request = rig.chat(body).header("x-session-id", session).header("x-turn-type", kind);
        let response = request.send().await.unwrap();
        let told = response.headers().get("x-oclaw-feedback");
        let told = told.map(|told| told.to_str().unwrap().to_owned());
        response.text().await.unwrap();
        told
    };
    send(&ask("first"), "s", "main").await;
    // The history was written anew, but the session is the same.
    let mut anew = ask("a summary, and a question");
    anew["reward"] = json!(0.25);
    assert_eq!(send(&anew, "s", "main").await.as_deref(), Some("taken"));
    // A side request may bring it as well.
    let mut side = ask("title?");
    side["feedback"] = json!("well done");
    send(&side, "s", "side").await;
    let mut stray = ask("hello");
    stray["reward"] = json!(1);
    assert_eq!(send(&stray, "nobody", "main").await.as_deref(), Some("no_turn"));
    assert!(rig.metrics().await.contains("oclaw_stray_feedback_total 1\n"));
    let rows = rig.rows().await;
    let of = |text: &str| {
        let row = rows.iter().find(|row| row.messages.contains(text)).unwrap();
        (row.reward_explicit, row.feedback_text.as_deref())
    };
    assert_eq!(of("first"), (Some(0.25), None));
    assert_eq!(of("a summary"), (None, Some("well done")));
    assert_eq!(of("hello"), (None, None));
}

/// A client may go on as soon as the answer is complete for it, before the engine
/// has said its last word and the turn is in the journal.
#[tokio::test]
async fn a_rating_may_come_before_the_turn_is_recorded() {
    let gate = Gate::default();
    let held = gate.clone();
    let script = move |seen: &Seen| match seen.text().contains("second") {
        true => json(200, &answer("a2")),
        false => vec![
            stream_head(),
            event(&delta("a1", -0.5)),
            event(&finish()),
            Step::Hold(held.clone()),
            done(),
            Step::End,
        ],
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let mut first = rig.chat(&ask_stream("first")).send().await.unwrap();
    until(&mut first, "\"finish_reason\":\"stop\"").await;
    let next = rig.chat(&second(json!({"reward": 0.75}))).send().await.unwrap();
    assert_eq!(next.headers()["x-oclaw-feedback"], "taken");
    next.text().await.unwrap();
    gate.open();
    first.text().await.unwrap();
    let rows = rig.rows().await;
    assert_eq!(rows.iter().find(|row| row.turn == 1).unwrap().reward_explicit, Some(0.75));
}

#[tokio::test]
async fn a_rating_for_a_written_row_goes_beside_it() {
    let script = |_: &Seen| json(200, &answer("a1"));
    let rig = Rig::start(Speaks::Sglang, script, |options| {
        options.journal.roll.rows = 1;
        options.session_idle = Duration::from_millis(1);
    })
    .await;
    rig.chat(&ask("first")).send().await.unwrap().text().await.unwrap();
    let written = async {
        while !rig.metrics().await.contains("oclaw_rows_total 1\n") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), written).await.unwrap();
    rig.chat(&second(json!({"reward": -1}))).send().await.unwrap().text().await.unwrap();
    let feedback = rig.folder.path().join("feedback");
    rig.running.shutdown().await.unwrap();
    let file = std::fs::read_dir(feedback).unwrap().next().unwrap().unwrap().path();
    let line: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let row = rows(rig.folder.path()).into_iter().find(|row| row.turn == 1).unwrap();
    assert_eq!(line["turn_id"], row.turn_id);
    assert_eq!((line["reward"].as_f64(), row.reward_explicit), (Some(-1.0), None));
}
