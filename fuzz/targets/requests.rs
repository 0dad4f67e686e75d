//! Bodies of requests as the embedded engine reads them: read or refused, and valid JSON
//! after a repair. In the prompt of a conversation only the template makes control tokens,
//! whatever its messages, tools and variables spell.

use std::fs;
use std::sync::OnceLock;

use oclaw::template::{Chat, Rendering, Tokenizer};
use oclaw::wire::json;
use oclaw::wire::sglang::{
    AbortBody, ChatBody, CompletionBody, DetokenizeBody, GenerateBody, LoadAdapterBody, PauseBody,
    TokenizeBody, UnloadAdapterBody, UpdateBody, VersionBody,
};

const FILES: [(&str, &str); 3] = [
    ("tokenizer.json", include_str!("../../fixtures/models/tiny-qwen3/tokenizer.json")),
    (
        "tokenizer_config.json",
        include_str!("../../fixtures/models/tiny-qwen3/tokenizer_config.json"),
    ),
    ("chat_template.jinja", include_str!("../../fixtures/models/tiny-qwen3/chat_template.jinja")),
];

pub(crate) fn run(bytes: &[u8]) {
    let Some(read) = json::parse(bytes) else { return };
    let text = &read.text[..];
    let again = json::parse(text);
    assert!(again.is_some_and(|again| !again.repaired() && again.value == read.value));
    reads(serde_json::from_slice::<CompletionBody>(text));
    reads(serde_json::from_slice::<GenerateBody>(text));
    reads(serde_json::from_slice::<UpdateBody>(text));
    reads(serde_json::from_slice::<VersionBody>(text));
    reads(serde_json::from_slice::<LoadAdapterBody>(text));
    reads(serde_json::from_slice::<UnloadAdapterBody>(text));
    reads(serde_json::from_slice::<PauseBody>(text));
    reads(serde_json::from_slice::<AbortBody>(text));
    let chat = chat();
    if let Ok(body) = serde_json::from_slice::<ChatBody>(text) {
        conversation(chat, &body);
    }
    if let Ok(TokenizeBody { prompt: Some(prompt), .. }) = serde_json::from_slice(text)
        && let Ok(ids) = chat.tokenizer.encode(&prompt)
    {
        known(&chat.tokenizer, &ids);
    }
    if let Ok(DetokenizeBody { tokens, .. }) = serde_json::from_slice(text) {
        let ids: Result<Vec<_>, _> = tokens.into_iter().map(i32::try_from).collect();
        let _ = ids.map(|ids| chat.tokenizer.decode(&ids, false));
    }
}

/// Whoever sent a body that cannot be read is told why.
fn reads<T>(read: Result<T, serde_json::Error>) {
    assert!(read.err().is_none_or(|error| !error.to_string().is_empty()));
}

/// The template writes the beginning and the end of each message, and may begin one more.
fn conversation(chat: &Chat, body: &ChatBody) {
    let none = serde_json::Map::new();
    let rendering = Rendering {
        messages: &body.messages,
        tools: body.tools.as_deref().filter(|tools| !tools.is_empty()),
        add_generation_prompt: true,
        extra: body.chat_template_kwargs.as_ref().unwrap_or(&none),
    };
    let ids = match chat.prompt_ids(&rendering) {
        Ok(ids) => ids,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    known(&chat.tokenizer, &ids);
    let count = |token: &str| {
        let id = chat.tokenizer.id_of(token).unwrap();
        ids.iter().filter(|found| **found == id).count()
    };
    let (begun, ended) = (count("<|im_start|>"), count("<|im_end|>"));
    assert!(begun == ended || begun == ended + 1, "{begun} {ended}");
    assert_eq!(count("<|endoftext|>"), 0);
}

fn known(tokenizer: &Tokenizer, ids: &[i32]) {
    let size = tokenizer.vocab_size();
    let is_known = |id: &i32| usize::try_from(*id).is_ok_and(|id| id < size);
    assert!(ids.iter().all(is_known));
}

/// Returns the tokenizer and the template, which are read once.
fn chat() -> &'static Chat {
    static CHAT: OnceLock<Chat> = OnceLock::new();
    CHAT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in FILES {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Chat::load(folder.path()).unwrap()
    })
}
