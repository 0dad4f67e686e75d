//! Server-sent events, lenient JSON and edits by byte range.

use oclaw::wire::json;
use oclaw::wire::openai::ChatRequest;
use oclaw::wire::span;
use oclaw::wire::sse::{Decoder, Event};
use proptest::prelude::*;
use serde_json::{Value, json};

fn decode(chunks: &[&[u8]]) -> Vec<Event> {
    let mut decoder = Decoder::default();
    let mut events: Vec<_> = chunks.iter().flat_map(|chunk| decoder.push(chunk)).collect();
    events.extend(decoder.finish());
    events
}

/// What a stream says: name and data of each event that has any.
fn said(events: &[Event]) -> Vec<(Option<String>, String)> {
    let text = |event: &Event| {
        let data = event.data.clone()?;
        Some((event.name.clone(), String::from_utf8(data).unwrap()))
    };
    events.iter().filter_map(text).collect()
}

#[test]
fn one_stream_in_many_dialects_is_one_decoding() {
    let dialects: &[&str] = &[
        "data: {\"a\":1}\n\ndata: 你好🦀\n\ndata: [DONE]\n\n",
        "data:{\"a\":1}\n\ndata:你好🦀\n\ndata:[DONE]\n\n",
        "data: {\"a\":1}\r\n\r\ndata: 你好🦀\r\n\r\ndata: [DONE]\r\n\r\n",
        "data: {\"a\":1}\r\rdata: 你好🦀\r\rdata: [DONE]\r\r",
        ": ping\n\ndata: {\"a\":1}\n\n:\n\n: ping\ndata: 你好🦀\n\ndata: [DONE]\n\n",
        "id: 1\ndata: {\"a\":1}\nretry: 5\n\nid: 2\ndata: 你好🦀\n\nunknown\ndata: [DONE]\n\n",
        "\u{feff}data: {\"a\":1}\n\n\n\n\ndata: 你好🦀\n\ndata: [DONE]",
        "data: {\"a\":1}\n\ndata: 你好🦀\n: late\n\ndata: [DONE]\n",
    ];
    let expected = said(&decode(&[dialects[0].as_bytes()]));
    assert_eq!(expected.len(), 3);
    for dialect in dialects {
        let bytes = dialect.as_bytes();
        assert_eq!(said(&decode(&[bytes])), expected, "{dialect:?}");
        let single: Vec<_> = bytes.chunks(1).collect();
        assert_eq!(said(&decode(&single)), expected, "{dialect:?} by bytes");
    }
}

#[test]
fn several_data_lines_are_one_event() {
    let events = decode(&[b"event: note\ndata: one\ndata:two\ndata\ndata:  three\n\n"]);
    let expected = (Some("note".to_owned()), "one\ntwo\n\n three".to_owned());
    assert_eq!(said(&events), [expected]);
}

#[test]
fn a_comment_does_not_wait_for_the_next_event() {
    let mut decoder = Decoder::default();
    let events: Vec<_> = decoder.push(b": ping\n").collect();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].raw.as_slice(), &events[0].data), (&b": ping\n"[..], &None));
}

#[test]
fn an_event_waits_for_a_line_feed_only_where_there_are_any() {
    let mut decoder = Decoder::default();
    assert_eq!(decoder.push(b"data: x\r\r").count(), 1);
    let mut decoder = Decoder::default();
    assert_eq!(decoder.push(b"data: x\r\n\r").count(), 0);
    let events: Vec<_> = decoder.push(b"\ndata: y\r\n\r\n").collect();
    assert_eq!(events[0].raw, b"data: x\r\n\r\n");
    assert_eq!(said(&events), [(None, "x".to_owned()), (None, "y".to_owned())]);
    let mut decoder = Decoder::default();
    assert_eq!(decoder.push(b"data: x\r\n\r").count(), 0);
    assert_eq!(decoder.finish().unwrap().data.as_deref(), Some(&b"x"[..]));
}

#[test]
fn a_block_without_end_is_let_through() {
    let mut decoder = Decoder::with_limit(16);
    let first: Vec<_> = decoder.push(b"data: 0123456789abcdef").collect();
    assert!(first.len() == 1 && first[0].oversized && first[0].data.is_none());
    let rest: Vec<_> = decoder.push(b"ghi\n\ndata: x\n\n").collect();
    assert_eq!(rest.iter().filter(|event| event.oversized).count(), 1);
    assert_eq!(said(&rest), [(None, "x".to_owned())]);
}

#[test]
fn a_cut_takes_exactly_its_bytes() {
    let raw = b"id: 7\r\ndata: {\"keep\":1,\r\ndata: \"drop\":2}\r\n\r\n";
    let events = decode(&[raw]);
    let data = events[0].data.clone().unwrap();
    assert_eq!(data, b"{\"keep\":1,\n\"drop\":2}");
    let members = span::members(&data, 0).unwrap();
    let cuts = span::cuts(&members, |number| number == 1);
    let expected = b"id: 7\r\ndata: {\"keep\":1}\r\n\r\n";
    assert_eq!(events[0].without(&cuts), expected);
    assert_eq!(events[0].without(&[]), raw);
}

proptest! {
    #[test]
    fn any_chunking_is_the_same_stream(
        texts in prop::collection::vec("[a-z😀\" ]{0,12}", 1..6),
        ends in prop::collection::vec(prop::sample::select(vec!["\n", "\r\n", "\r"]), 1..4),
        cuts in prop::collection::vec(1_usize..9, 1..40),
    ) {
        let mut stream = String::new();
        for (number, text) in texts.iter().enumerate() {
            let end = ends[number % ends.len()];
            stream.push_str(&format!(": c{end}data: {text}{end}{end}"));
        }
        let bytes = stream.as_bytes();
        let mut chunks = Vec::new();
        let mut rest = bytes;
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (chunk, after) = rest.split_at((*cut).min(rest.len()));
            chunks.push(chunk);
            rest = after;
        }
        let events = decode(&chunks);
        let expected: Vec<_> = texts.iter().map(|text| (None, text.trim_start_matches('\u{feff}').to_owned())).collect();
        prop_assert_eq!(said(&events), expected);
        // Nothing is lost, doubled or moved.
        let whole: Vec<u8> = events.iter().flat_map(|event| event.raw.clone()).collect();
        prop_assert_eq!(whole, bytes);
        let mut at = 0;
        for event in &events {
            prop_assert_eq!(event.range.start, at);
            at = event.range.end;
        }
        prop_assert_eq!(at, bytes.len() as u64);
    }

    #[test]
    fn any_bytes_are_passed_on(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 1_usize..20) {
        let chunks: Vec<_> = bytes.chunks(cut).collect();
        let whole: Vec<u8> = decode(&chunks).iter().flat_map(|event| event.raw.clone()).collect();
        prop_assert_eq!(whole, bytes);
    }

    #[test]
    fn cut_members_are_gone_and_nothing_else(
        keys in prop::collection::btree_set("[a-e]{1,2}", 0..7),
        doomed in prop::collection::btree_set("[a-e]{1,2}", 0..7),
        spaces in "[ \\n\\t]{0,2}",
    ) {
        let members: Vec<_> = keys
            .iter()
            .enumerate()
            .map(|(number, key)| format!("{spaces}\"{key}\"{spaces}:{spaces}[{number},{{\"x\":\"}},\"}}]"))
            .collect();
        let text = format!("{{{}{spaces}}}", members.join(","));
        let mut expected: Value = serde_json::from_str(&text).unwrap();
        let members = span::members(text.as_bytes(), 0).unwrap();
        let gone = |number: usize| doomed.iter().any(|key| members[number].is(text.as_bytes(), key));
        let edits: Vec<_> =
            span::cuts(&members, gone).into_iter().map(|range| (range, String::new())).collect();
        let cut = span::edit(text.as_bytes(), &edits);
        for key in &doomed {
            expected.as_object_mut().unwrap().shift_remove(key);
        }
        let found: Value = serde_json::from_slice(&cut).unwrap();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn the_scanner_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        let _ = span::members(&bytes, 0);
        let _ = span::items(&bytes, 0);
        let _ = json::parse(&bytes);
    }
}

#[test]
fn half_a_surrogate_pair_is_replaced_and_told() {
    for (text, expected) in [
        (r#"["\ud83d"]"#, json!(["\u{fffd}"])),
        (r#"["a\ud83d b"]"#, json!(["a\u{fffd} b"])),
        (r#"["\udd80\ud83e\udd80"]"#, json!(["\u{fffd}🦀"])),
        (r#"["\\ud83d"]"#, json!(["\\ud83d"])),
        (r#"{"lp":NaN,"x":-Infinity,"t":"NaN"}"#, json!({"lp": null, "x": null, "t": "NaN"})),
    ] {
        let read = json::parse(text.as_bytes()).unwrap();
        assert_eq!(read.value, expected, "{text}");
        assert_eq!(read.repaired(), text != r#"["\\ud83d"]"#, "{text}");
    }
    assert!(json::parse(b"[\"\xf0\x9f\"]").unwrap().repaired());
    assert!(!json::parse(b"[1]").unwrap().repaired());
    assert!(json::parse(b"{\"a\":").is_none());
    assert!(json::parse(&b"[".repeat(100_000)).is_none());
}

#[test]
fn a_chat_request_is_read_leniently() {
    let body = br#"{"model":"m", "messages":[ {"role":"user","content":"hi"} ],
        "temperature":0.5,"top_k":4,"n":"three","stream":true,"tools":[],"logprobs":true,
        "session_id":"s","session_done":"yes","prompt_cache_key":"k:0","max_tokens":7}"#;
    let request = ChatRequest::read(body).unwrap();
    assert_eq!(request.messages_text, r#"[ {"role":"user","content":"hi"} ]"#);
    assert_eq!(request.tools_text, None);
    assert_eq!((request.choices, request.stream, request.asks("logprobs")), (1, true, true));
    assert_eq!(request.settings.temperature, Some(0.5));
    assert_eq!((request.settings.top_k, request.settings.max_tokens), (Some(4), Some(7)));
    assert_eq!(request.session.id.as_deref(), Some("s"));
    assert!(request.session.done && !request.include_usage);
    for bad in [&b"[]"[..], b"{}", b"{\"messages\":{}}", b"nonsense"] {
        assert_eq!(ChatRequest::read(bad), None);
    }
}
