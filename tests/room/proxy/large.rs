//! Answers that are too large to be held, and such as are just large.

use oclaw::trajectory::words::Status;
use serde_json::{Value, json};

use super::odd::{gzip, packed_head};
use super::{Gate, Rig, Seen, Speaks, Step, answer, ask, ask_stream, delta, done, event, finish};
use super::{stream_head, until};
use crate::harness::fake_upstream::json as whole;

/// Limit of these tests.
const HELD: usize = 64 << 10;

async fn rig(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> Rig {
    Rig::start(Speaks::Sglang, script, |options| options.limits.answer_bytes = HELD).await
}

/// Makes an answer of exactly so many bytes.
fn sized(bytes: usize) -> String {
    answer(&"x".repeat(bytes - answer("").len()))
}

async fn nothing_recorded_but_counted(rig: Rig, count: u64) {
    let metrics = rig.metrics().await;
    let line = format!("oclaw_skipped_total{{reason=\"answer_too_large\"}} {count}");
    assert!(metrics.contains(&line), "{metrics}");
    let summary = rig.running.shutdown().await.unwrap();
    assert_eq!(summary.skipped, [("answer_too_large", count)]);
    assert_eq!((summary.turns, summary.rows, summary.open), (0, 0, 0));
}

#[tokio::test]
async fn the_limit_itself_is_recorded_and_a_byte_more_only_passes() {
    for (bytes, recorded) in [(HELD, 1), (HELD + 1, 0)] {
        let rig = rig(move |_| whole(200, &sized(bytes))).await;
        let text = rig.chat(&ask("hi")).send().await.unwrap().text().await.unwrap();
        let body: Value = serde_json::from_str(&text).unwrap();
        let content = body["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(content.len(), bytes - answer("").len());
        match recorded {
            1 => assert_eq!(rig.rows().await.len(), 1),
            _ => {
                assert_eq!(text, sized(bytes), "it passes as it came");
                nothing_recorded_but_counted(rig, 1).await;
            }
        }
    }
}

#[tokio::test]
async fn what_is_too_large_passes_while_it_comes() {
    let gate = Gate::default();
    let held = gate.clone();
    let rig = rig(move |_| {
        let text = sized(3 * HELD).into_bytes();
        let head = Step::Head(200, vec![("content-type", "application/json".to_owned())]);
        let (start, rest) = text.split_at(2 * HELD);
        vec![
            head,
            Step::Send(start.to_vec()),
            Step::Hold(held.clone()),
            Step::Send(rest.to_vec()),
            Step::End,
        ]
    })
    .await;
    let mut response = rig.chat(&ask("hi")).send().await.unwrap();
    let mut found = Vec::new();
    while found.len() < 2 * HELD {
        found.extend_from_slice(&response.chunk().await.unwrap().unwrap());
    }
    gate.open();
    while let Some(piece) = response.chunk().await.unwrap() {
        found.extend_from_slice(&piece);
    }
    assert_eq!(String::from_utf8(found).unwrap(), sized(3 * HELD));
    nothing_recorded_but_counted(rig, 1).await;
}

#[tokio::test]
async fn what_is_packed_counts_unpacked() {
    const UNPACKED: usize = 24 << 20;
    let rig = rig(|_| {
        let packed = gzip(sized(UNPACKED).as_bytes());
        assert!(packed.len() < HELD);
        vec![packed_head("application/json", "gzip"), Step::Send(packed), Step::End]
    })
    .await;
    let text = rig.chat(&ask("hi")).send().await.unwrap().text().await.unwrap();
    assert!(text == sized(UNPACKED), "{} bytes", text.len());
    nothing_recorded_but_counted(rig, 1).await;
}

#[tokio::test]
async fn a_stream_that_grows_too_large_is_cut_and_passed_to_its_end() {
    let rig = rig(|_| {
        let mut steps = vec![stream_head()];
        steps.extend((0..1000).map(|_| event(&delta(&"y".repeat(100), -0.5))));
        steps.extend([event(&finish()), done(), Step::End]);
        steps
    })
    .await;
    let text = rig.chat(&ask_stream("hi")).send().await.unwrap().text().await.unwrap();
    assert_eq!(text.matches(&"y".repeat(100)).count(), 1000);
    assert!(!text.contains("logprob") && text.ends_with("data: [DONE]\n\n"));
    nothing_recorded_but_counted(rig, 1).await;
}

#[tokio::test]
async fn an_endless_line_passes_while_it_comes() {
    let gate = Gate::default();
    let held = gate.clone();
    let rig = rig(move |_| {
        let mut steps = vec![stream_head(), Step::Send(b"data: ".to_vec())];
        steps.extend((0..64).map(|_| Step::Send(vec![b'z'; 16 << 10])));
        steps.push(Step::Hold(held.clone()));
        steps.extend([Step::Send(b"\n\n".to_vec()), event(&delta("end", -0.5)), done(), Step::End]);
        steps
    })
    .await;
    let mut response = rig.chat(&ask_stream("hi")).send().await.unwrap();
    let mut length = 0;
    while length < 6 + 64 * (16 << 10) {
        length += response.chunk().await.unwrap().unwrap().len();
    }
    gate.open();
    let rest = until(&mut response, "[DONE]").await;
    assert!(rest.contains("\"end\"") && !rest.contains("logprob"), "{rest}");
    nothing_recorded_but_counted(rig, 1).await;
}

#[tokio::test]
async fn what_is_large_but_within_the_limit_is_recorded() {
    const LARGE: usize = 1 << 20;
    let script = |seen: &Seen| match seen.text().contains("\"stream\":true") {
        false => whole(200, &sized(LARGE)),
        true => {
            let many = event(&delta(&"w".repeat(LARGE), -0.5));
            let ids = json!({"id": "c", "choices": [], "sglext": {"input_ids": [1], "output_ids": [[8]]}});
            let end = json!({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]});
            vec![stream_head(), many, event(&end), event(&ids), done(), Step::End]
        }
    };
    let rig = Rig::start(Speaks::Sglang, script, |_| {}).await;
    let text = rig.chat(&ask("hi")).send().await.unwrap().text().await.unwrap();
    assert!(!text.contains("meta_info") && text.len() > LARGE / 2);
    let text = rig.chat(&ask_stream("ho")).send().await.unwrap().text().await.unwrap();
    assert!(!text.contains("logprob") && text.contains(&"w".repeat(LARGE)));
    let rows = rig.rows().await;
    let found: Vec<_> = rows.iter().map(|row| (row.status, &row.untrainable_reason)).collect();
    assert_eq!(found, [(Status::Complete, &None), (Status::Truncated, &None)]);
    assert!(rows[1].response.contains(&"w".repeat(LARGE)));
}
