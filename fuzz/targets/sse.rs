//! Server-sent events: whatever comes, in whatever chunks, every byte leaves once and
//! in its order, and no block is held beyond the limit.

use oclaw::wire::sse::{Decoder, Event};

const LIMIT: usize = 64;

/// The first byte says how large the chunks are.
pub(crate) fn run(bytes: &[u8]) {
    let Some((first, stream)) = bytes.split_first() else { return };
    let size = usize::from(*first) + 1;
    for limit in [LIMIT, 1 << 20] {
        let mut decoder = Decoder::with_limit(limit);
        let mut events: Vec<Event> = Vec::new();
        for chunk in stream.chunks(size) {
            events.extend(decoder.push(chunk));
        }
        events.extend(decoder.finish());
        let raw: Vec<u8> = events.iter().flat_map(|event| event.raw.clone()).collect();
        assert_eq!(raw, stream);
        for event in &events {
            let data = event.data.as_ref().map_or(0, Vec::len);
            assert!(data <= event.raw.len() && event.raw.len() <= limit + size + 2);
            let spans = [0..data / 3, data / 2..data];
            assert!(event.without(&spans).len() <= event.raw.len());
        }
    }
}
