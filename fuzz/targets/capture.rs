//! Answers of engines, as streams of deltas and as documents, in every dialect: what
//! is captured fits together, and a stream says the same in whatever chunks.

use oclaw::capture::{Captured, Dialect, Ending, Relay, StreamCapture, prepare, read_answer};
use oclaw::wire::openai::ChatRequest;
use oclaw::wire::sse::{Decoder, Event};

const DIALECTS: [Dialect; 4] =
    [Dialect::Sglang, Dialect::Vllm, Dialect::LlamaCpp, Dialect::Generic];

/// The first byte says which dialect, the second how large the chunks are.
pub(crate) fn run(bytes: &[u8]) {
    let [first, size, answer @ ..] = bytes else { return };
    let dialect = DIALECTS[usize::from(*first) % DIALECTS.len()];
    let request = |stream: bool| {
        let body = format!(r#"{{"messages":[{{"role":"user"}}],"stream":{stream},"n":2}}"#);
        ChatRequest::read(body.as_bytes()).map(|read| prepare(body.as_bytes(), &read, dialect))
    };
    if let Some(prepared) = request(false) {
        read_answer(answer, &prepared).captured.iter().for_each(check);
    }
    let stream = |size: usize| {
        let mut decoder = Decoder::default();
        let mut capture = StreamCapture::new(request(true)?);
        let mut client = Vec::new();
        let mut relay = |capture: &mut StreamCapture, event: Event| match capture.event(&event) {
            Relay::Pass => client.extend_from_slice(&event.raw),
            Relay::Edited(bytes) => client.extend_from_slice(&bytes),
            Relay::Drop => {}
        };
        for chunk in answer.chunks(size) {
            decoder.push(chunk).for_each(|event| relay(&mut capture, event));
        }
        decoder.finish().into_iter().for_each(|event| relay(&mut capture, event));
        let captured = capture.finish(Ending::Closed);
        Some((client, captured))
    };
    let whole = stream(answer.len().max(1));
    assert_eq!(stream(usize::from(*size) + 1), whole);
    whole.iter().flat_map(|(_, captured)| captured).for_each(check);
}

fn check(captured: &Captured) {
    if let (Some(ids), Some(log_probs)) = (&captured.response_ids, &captured.log_probs) {
        assert_eq!(ids.len(), log_probs.len());
    }
    let finite = |value: &Option<f32>| value.is_none_or(f32::is_finite);
    assert!(captured.log_probs.iter().flatten().all(finite));
    let of_ids = captured.prompt_ids.iter().chain(&captured.response_ids).flatten();
    assert!(of_ids.copied().all(|id| id >= 0));
}
