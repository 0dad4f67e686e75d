//! Chat strings and token ids as `transformers` and `tokenizers` made them, for
//! every model that has both a folder and a golden file.
//!
//! Deliberately different, by rule: a message text that holds a control token
//! gets other ids from `prompt_ids` (faults.md T12), since Python lets a user
//! type control tokens.

use oclaw::template::{Chat, Rendering};
use serde_json::{Map, Value};

use crate::harness::{list, models, recorded_models, skip_model};

struct Subject {
    name: String,
    chat: Chat,
    recorded: Value,
}

fn subjects() -> Vec<Subject> {
    let subject = |(name, recorded): (String, Value)| {
        let folder = models().join(&name);
        if !folder.join("tokenizer.json").is_file() {
            skip_model(&format!("no tokenizer of {name}"));
            return None;
        }
        Some(Subject { chat: Chat::load(&folder).unwrap(), name, recorded })
    };
    recorded_models().into_iter().filter_map(subject).collect()
}

struct Options {
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    extra: Map<String, Value>,
}

fn options(case: &Value) -> Options {
    let mut extra = case["options"].as_object().cloned().unwrap_or_default();
    let tools = extra.remove("tools").and_then(|tools| tools.as_array().cloned());
    let add = extra.remove("add_generation_prompt");
    Options { tools, add_generation_prompt: add == Some(Value::Bool(true)), extra }
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

/// Whether some tool call's arguments are text that Python would spell
/// otherwise if it were the object. Servers parse it, `transformers` does not.
fn holds_respelt_arguments(messages: &[Value], chat: &Chat, rendering: &Rendering<'_>) -> bool {
    let calls = messages.iter().filter_map(|message| message["tool_calls"].as_array()).flatten();
    let texts = calls.filter_map(|call| call["function"]["arguments"].as_str());
    let respelt = |text: &str| {
        let parsed = serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
        parsed && !chat.render(rendering).unwrap().contains(text)
    };
    texts.into_iter().any(respelt)
}

#[test]
fn rendered_byte_for_byte() {
    for Subject { name, chat, recorded } in subjects() {
        for case in list(&recorded, "chat") {
            let messages = case["messages"].as_array().unwrap();
            let options = options(case);
            let rendering = Rendering {
                messages,
                tools: options.tools.as_deref(),
                add_generation_prompt: options.add_generation_prompt,
                extra: &options.extra,
            };
            let tools = options.tools.clone().map_or(Value::Null, Value::Array);
            let exact = chat.template().render(
                &case["messages"],
                &tools,
                options.add_generation_prompt,
                &options.extra,
            );
            assert_eq!(exact.unwrap(), case["rendered"], "{name}: {}", case["name"]);
            if !holds_respelt_arguments(messages, &chat, &rendering) {
                let rendered = chat.render(&rendering).unwrap();
                assert_eq!(rendered, case["rendered"], "{name}: {}", case["name"]);
            }
        }
    }
}

#[test]
fn chat_ids_and_back() {
    for Subject { name, chat, recorded } in subjects() {
        let tokenizer = &chat.tokenizer;
        for case in list(&recorded, "chat") {
            let rendered = case["rendered"].as_str().unwrap();
            let expected = ids(&case["ids"]);
            assert_eq!(tokenizer.encode(rendered).unwrap(), expected, "{name}: {}", case["name"]);
            for (skip, key) in [(false, "decoded"), (true, "decoded_skip_special")] {
                let decoded = tokenizer.decode(&expected, skip).unwrap();
                assert_eq!(decoded, case[key], "{name}: {} {key}", case["name"]);
                let mut decoder = tokenizer.decoder(skip);
                let mut streamed: String =
                    expected.iter().filter_map(|id| decoder.step(*id)).collect();
                streamed.push_str(&decoder.finish().unwrap_or_default());
                assert_eq!(streamed, case[key], "{name}: {} {key} streamed", case["name"]);
            }
        }
        for case in list(&recorded, "encode") {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{name}: {text:?}");
        }
    }
}

#[test]
fn prompt_ids_equal_unless_control_tokens_were_typed() {
    for Subject { name, chat, recorded } in subjects() {
        let specials: Vec<String> = (0..chat.tokenizer.vocab_size() as i32)
            .filter(|id| chat.tokenizer.is_special(*id))
            .map(|id| chat.tokenizer.token_of(id).unwrap())
            .collect();
        let typed = |text: &str| specials.iter().any(|special| text.contains(special.as_str()));
        for case in list(&recorded, "chat") {
            let messages = case["messages"].as_array().unwrap();
            let options = options(case);
            let rendering = Rendering {
                messages,
                tools: options.tools.as_deref(),
                add_generation_prompt: options.add_generation_prompt,
                extra: &options.extra,
            };
            if holds_respelt_arguments(messages, &chat, &rendering) {
                continue;
            }
            let found = chat.prompt_ids(&rendering).unwrap();
            let specials_in =
                |ids: &[i32]| ids.iter().filter(|id| chat.tokenizer.is_special(**id)).count();
            if !typed(&case["messages"].to_string()) && !typed(&case["options"].to_string()) {
                assert_eq!(found, ids(&case["ids"]), "{name}: {}", case["name"]);
                continue;
            }
            assert_eq!(
                chat.tokenizer.decode(&found, false).unwrap(),
                case["decoded"],
                "{name}: {}",
                case["name"]
            );
            // The same messages without anything that looks like a token.
            let harmless: Vec<Value> =
                serde_json::from_str(&case["messages"].to_string().replace('<', "(")).unwrap();
            let plain = chat.prompt_ids(&Rendering { messages: &harmless, ..rendering }).unwrap();
            assert_eq!(specials_in(&found), specials_in(&plain), "{name}: {}", case["name"]);
            assert!(
                specials_in(&found) < specials_in(&ids(&case["ids"])),
                "{name}: {}",
                case["name"]
            );
        }
    }
}
