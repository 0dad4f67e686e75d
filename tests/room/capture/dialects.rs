//! One answer, told in every dialect and every way of writing events, is one
//! capture.

use super::*;

/// A token of the answer, and what the client sees of it.
#[derive(Debug, Clone)]
struct Token {
    id: i32,
    log_prob: f64,
    shows: Shows,
}

#[derive(Debug, Clone)]
enum Shows {
    Text(String),
    Thought(String),
    /// A fragment of a tool call's arguments.
    Call(usize, String),
    /// Half a character, or markup that a parser swallows.
    Nothing,
}

/// How a server writes its answer.
#[derive(Debug, Clone)]
struct Style {
    /// Tokens per chunk.
    step: usize,
    line_end: &'static str,
    space: bool,
    comments: bool,
    fields: bool,
    /// A document is broken over two `data` lines.
    broken: bool,
    done: bool,
    blank_end: bool,
    thought: &'static str,
    /// Bytes per piece of the network, again and again.
    pieces: Vec<usize>,
}

const PROMPT: [i32; 3] = [5, 6, 7];
const END: i32 = 2;

fn token() -> impl Strategy<Value = Token> {
    let text = prop::sample::select(vec!["a", " b", "你好", "🦀", "\"", "\\n", "}\n", "data: x"]);
    let shows = prop_oneof![
        4 => text.clone().prop_map(|text| Shows::Text(text.to_owned())),
        2 => text.clone().prop_map(|text| Shows::Thought(text.to_owned())),
        2 => (0_usize..2, text).prop_map(|(call, text)| Shows::Call(call, text.to_owned())),
        1 => Just(Shows::Nothing),
    ];
    (10_i32..99, 1_u8..64, shows).prop_map(|(id, part, shows)| Token {
        id,
        log_prob: -f64::from(part) / 16.0,
        shows,
    })
}

fn style() -> impl Strategy<Value = Style> {
    let line_end = prop::sample::select(vec!["\n", "\r\n", "\r"]);
    let thought = prop::sample::select(vec!["reasoning_content", "reasoning"]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let ends = (any::<bool>(), any::<bool>());
    let pieces = prop::collection::vec(1_usize..40, 1..8);
    (1_usize..4, line_end, flags, ends, thought, pieces).prop_map(
        |(
            step,
            line_end,
            (space, comments, fields, broken),
            (done, blank_end),
            thought,
            pieces,
        )| {
            Style {
                step,
                line_end,
                space,
                comments,
                fields,
                broken,
                done,
                blank_end,
                thought,
                pieces,
            }
        },
    )
}

/// Writes the deltas of one step. A call's first fragment carries its name.
fn deltas(tokens: &[Token], style: &Style, begun: &mut [bool; 2]) -> Vec<Value> {
    let one = |token: &Token| match &token.shows {
        Shows::Nothing => None,
        Shows::Text(text) => Some(json!({"content": text})),
        Shows::Thought(text) => Some(json!({style.thought: text})),
        Shows::Call(call, text) => {
            let mut fragment = json!({"index": call, "function": {"arguments": text}});
            if !std::mem::replace(&mut begun[*call], true) {
                fragment["id"] = json!(format!("call_{call}"));
                fragment["type"] = json!("function");
                fragment["function"]["name"] = json!(format!("f{call}"));
            }
            Some(json!({"tool_calls": [fragment]}))
        }
    };
    let shown: Vec<_> = tokens.iter().filter_map(one).collect();
    if shown.is_empty() { vec![json!({})] } else { shown }
}

/// Writes the answer as the documents of one dialect.
fn documents(tokens: &[Token], style: &Style, dialect: Dialect) -> Vec<Value> {
    let named = dialect == Dialect::LlamaCpp;
    let row = |token: &Token| match named {
        true => json!({"id": token.id, "token": "t", "logprob": token.log_prob}),
        false => json!({"token": "t", "logprob": token.log_prob}),
    };
    let mut found = vec![
        json!({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}),
    ];
    if dialect == Dialect::Vllm {
        found[0]["prompt_token_ids"] = json!(PROMPT);
    }
    let mut begun = [false; 2];
    for step in tokens.chunks(style.step) {
        for (place, delta) in deltas(step, style, &mut begun).into_iter().enumerate() {
            let mut choice =
                json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null});
            // What belongs to the step stands on its first delta.
            if place == 0 && dialect != Dialect::Generic {
                choice["logprobs"] = json!({"content": step.iter().map(row).collect::<Vec<_>>()});
            }
            if place == 0 && dialect == Dialect::Vllm {
                choice["token_ids"] = json!(step.iter().map(|token| token.id).collect::<Vec<_>>());
            }
            found.push(json!({"id": "c", "choices": [choice]}));
        }
    }
    let mut end = json!({"index": 0, "delta": {}, "finish_reason": "stop"});
    match dialect {
        Dialect::Sglang => end["matched_stop"] = json!(END),
        Dialect::Vllm => end["stop_reason"] = Value::Null,
        Dialect::LlamaCpp | Dialect::Generic => {}
    }
    found.push(json!({"id": "c", "choices": [end]}));
    if dialect == Dialect::Sglang {
        let ids: Vec<_> = tokens.iter().map(|token| token.id).collect();
        found.push(
            json!({"id": "c", "choices": [], "sglext": {"input_ids": PROMPT, "output_ids": [ids]}}),
        );
    }
    if dialect != Dialect::Generic {
        found.push(json!({"id": "c", "choices": [], "usage": {"completion_tokens": tokens.len()}}));
    }
    found
}

/// Writes documents as events in one style.
fn written(documents: &[Value], style: &Style) -> String {
    let field = |name: &str, value: &str| {
        let space = if style.space { " " } else { "" };
        format!("{name}:{space}{value}{}", style.line_end)
    };
    let mut text = String::new();
    for (number, document) in documents.iter().enumerate() {
        if style.comments {
            text.push_str(&format!(": ping{0}{0}", style.line_end));
        }
        if style.fields {
            text.push_str(&field("event", "message"));
            text.push_str(&field("id", &number.to_string()));
        }
        let line = document.to_string();
        match line.split_once(',').filter(|_| style.broken) {
            // Between two members a line break is only white space.
            Some((before, after)) => {
                text.push_str(&field("data", &format!("{before},")));
                text.push_str(&field("data", after));
            }
            None => text.push_str(&field("data", &line)),
        }
        text.push_str(style.line_end);
    }
    if style.done {
        text.push_str(&field("data", "[DONE]"));
        text.push_str(style.line_end);
    }
    if !style.blank_end {
        text.truncate(text.trim_end_matches(['\r', '\n']).len());
    }
    text
}

/// Reads a stream in pieces. Returns what the client gets and what is recorded.
fn captured(text: &str, style: &Style, dialect: Dialect) -> (Vec<u8>, Captured) {
    let mut decoder = Decoder::default();
    let mut capture = StreamCapture::new(prepared(STREAM, dialect));
    let mut events = Vec::new();
    let mut rest = text.as_bytes();
    for size in style.pieces.iter().cycle() {
        let (piece, after) = rest.split_at((*size).min(rest.len()));
        events.extend(decoder.push(piece));
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    events.extend(decoder.finish());
    let client = relayed(&mut capture, &events);
    let mut found = capture.finish(Ending::Closed);
    assert_eq!(found.len(), 1);
    (client, found.remove(0))
}

/// Returns the message, whatever it calls its thoughts.
fn message(response: &Value, style: &Style) -> Value {
    let mut message = response.clone();
    if let Some(thought) = message.as_object_mut().unwrap().shift_remove(style.thought) {
        message["thought"] = thought;
    }
    message
}

/// The message that the tokens come to.
fn expected(tokens: &[Token]) -> Value {
    let mut message = json!({"role": "assistant", "content": ""});
    let mut calls: BTreeMap<usize, String> = BTreeMap::new();
    let mut thought = None::<String>;
    for token in tokens {
        match &token.shows {
            Shows::Nothing => {}
            Shows::Text(text) => {
                message["content"] =
                    json!(format!("{}{text}", message["content"].as_str().unwrap()));
            }
            Shows::Thought(text) => thought.get_or_insert_default().push_str(text),
            Shows::Call(call, text) => calls.entry(*call).or_default().push_str(text),
        }
    }
    if let Some(thought) = thought {
        message["thought"] = json!(thought);
    }
    if !calls.is_empty() {
        let call = |(call, arguments): (usize, String)| json!({"function": {"arguments": arguments, "name": format!("f{call}")}, "id": format!("call_{call}"), "type": "function"});
        message["tool_calls"] = calls.into_iter().map(call).collect();
    }
    message
}

/// Joins what the client got, as a client does.
fn as_client(client: &[u8], style: &Style) -> (Value, bool) {
    let mut decoder = Decoder::default();
    let mut events: Vec<_> = decoder.push(client).collect();
    events.extend(decoder.finish());
    let mut reader = StreamCapture::new(prepared(STREAM, Dialect::Generic));
    let mut told = false;
    for event in &events {
        reader.event(event);
        let data = event.data.as_deref().unwrap_or_default();
        let text = String::from_utf8_lossy(data);
        let ours = ["\"logprobs\":{", "token_ids", "sglext", "\"usage\""];
        told |= ours.iter().any(|name| text.contains(name));
    }
    (message(&reader.finish(Ending::Closed)[0].response, style), told)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn one_answer_is_one_capture_in_every_dialect_and_style(
        tokens in prop::collection::vec(token(), 1..10),
        styles in prop::collection::vec(style(), 4),
    ) {
        use Dialect::{Generic, LlamaCpp, Sglang, Vllm};
        let ids: Vec<_> = tokens.iter().map(|token| token.id).collect();
        let log_probs: Vec<_> = tokens.iter().map(|token| Some(token.log_prob as f32)).collect();
        for (dialect, style) in [Sglang, Vllm, LlamaCpp, Generic].into_iter().zip(&styles) {
            let text = written(&documents(&tokens, style, dialect), style);
            let (client, found) = captured(&text, style, dialect);
            prop_assert_eq!(message(&found.response, style), expected(&tokens), "{:?}", dialect);
            prop_assert_eq!(found.outcome, Outcome::Complete);
            let (ids, log_probs, prompt, reason) = match dialect {
                Sglang | Vllm => (Some(ids.clone()), Some(log_probs.clone()), Some(PROMPT.to_vec()), None),
                LlamaCpp => (Some(ids.clone()), Some(log_probs.clone()), None, Some("no_prompt_ids")),
                Generic => (None, None, None, Some("no_token_ids")),
            };
            prop_assert_eq!(found.response_ids, ids, "{:?}", dialect);
            prop_assert_eq!(found.log_probs, log_probs, "{:?}", dialect);
            prop_assert_eq!(found.prompt_ids, prompt, "{:?}", dialect);
            prop_assert_eq!(found.untrainable_reason, reason, "{:?}", dialect);
            // The client can read the same of its copy, and nothing of what is ours.
            prop_assert_eq!(as_client(&client, style), (expected(&tokens), false), "{:?}", dialect);
            if dialect == Generic {
                prop_assert_eq!(String::from_utf8(client).unwrap(), text);
            }
        }
    }
}
