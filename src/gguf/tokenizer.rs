//! The tokenizer of a GGUF file in the form of Hugging Face's files.

use serde_json::{Map, Value as Json, json};

use super::Error;
use super::reader::{Gguf, Value};

/// ggml's token types: a control token, and one that was added by a user.
const CONTROL: usize = 3;
const USER_DEFINED: usize = 4;

/// The tokenizer's files and what the model's own settings repeat of it.
pub(super) struct Tokenizer {
    pub(super) tokenizer: Json,
    pub(super) tokenizer_config: Json,
    pub(super) special_tokens_map: Json,
    pub(super) vocab_size: usize,
    pub(super) bos: Option<usize>,
    pub(super) eos: Option<usize>,
    pub(super) pad: Option<usize>,
}

pub(super) fn tokenizer(gguf: &Gguf) -> Result<Tokenizer, Error> {
    let unsupported = |key: &str, found: &str, supported| {
        let (path, what) = (gguf.path().to_owned(), format!("`{key}`"));
        Err(Error::Unsupported { path, what, found: found.to_owned(), supported })
    };
    let model = gguf.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return unsupported("tokenizer.ggml.model", model, "gpt2 (byte-level BPE)");
    }
    let pre = gguf.text("tokenizer.ggml.pre")?;
    if pre != "smollm" {
        return unsupported("tokenizer.ggml.pre", pre, "smollm");
    }
    let tokens = gguf.texts("tokenizer.ggml.tokens")?;
    let added = added_tokens(gguf, &tokens)?;
    let special = |name: &str| special_token(gguf, &tokens, name);
    let (bos, eos) = (special("bos")?, special("eos")?);
    let (unknown, pad) = (special("unknown")?, special("padding")?);

    let mut config = Map::new();
    let mut map = Map::new();
    config.insert("add_prefix_space".to_owned(), false.into());
    let by_id = added.iter().map(|(id, token)| (id.to_string(), token.clone()));
    config.insert("added_tokens_decoder".to_owned(), Json::Object(by_id.collect()));
    for (name, token) in [("bos", bos), ("eos", eos), ("pad", pad), ("unk", unknown)] {
        if let Some(id) = token {
            let flags = json!({"content": tokens[id], "lstrip": false, "normalized": false,
                "rstrip": false, "single_word": false});
            config.insert(format!("{name}_token"), tokens[id].into());
            map.insert(format!("{name}_token"), flags);
        }
    }
    if let Some(Value::Text(template)) = gguf.value("tokenizer.chat_template") {
        config.insert("chat_template".to_owned(), template.as_str().into());
    }
    config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    if let Ok(length) = gguf.count("llama.context_length") {
        config.insert("model_max_length".to_owned(), length.into());
    }
    config.insert("tokenizer_class".to_owned(), "GPT2Tokenizer".into());

    Ok(Tokenizer {
        tokenizer: tokenizer_json(gguf, &tokens, &added)?,
        tokenizer_config: Json::Object(config),
        special_tokens_map: Json::Object(map),
        vocab_size: tokens.len(),
        bos,
        eos,
        pad,
    })
}

/// Returns the tokens that are found in a text before it is split, by id.
fn added_tokens(gguf: &Gguf, tokens: &[&str]) -> Result<Vec<(usize, Json)>, Error> {
    let key = "tokenizer.ggml.token_type";
    let wrong = || gguf.missing(key, "list of one whole number per token");
    let Some(Value::List(types)) = gguf.value(key) else { return Err(wrong()) };
    if types.len() != tokens.len() {
        return Err(wrong());
    }
    let mut added = Vec::new();
    for (id, (kind, token)) in types.iter().zip(tokens).enumerate() {
        let kind = match kind {
            Value::Signed(kind) => usize::try_from(*kind).map_err(|_| wrong())?,
            Value::Unsigned(kind) => *kind as usize,
            _ => return Err(wrong()),
        };
        if kind == CONTROL || kind == USER_DEFINED {
            let flags = json!({"content": token, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": kind == CONTROL});
            added.push((id, flags));
        }
    }
    Ok(added)
}

/// Returns the id under `tokenizer.ggml.NAME_token_id`, if there is one.
fn special_token(gguf: &Gguf, tokens: &[&str], name: &str) -> Result<Option<usize>, Error> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    if gguf.value(&key).is_none() {
        return Ok(None);
    }
    match gguf.count(&key)? {
        id if id < tokens.len() => Ok(Some(id)),
        _ => Err(gguf.missing(&key, "id of a token")),
    }
}

fn tokenizer_json(gguf: &Gguf, tokens: &[&str], added: &[(usize, Json)]) -> Result<Json, Error> {
    let malformed = |problem: String| Error::Malformed { path: gguf.path().to_owned(), problem };
    let mut vocab = Map::new();
    for (id, token) in tokens.iter().enumerate() {
        if vocab.insert((*token).to_owned(), id.into()).is_some() {
            return Err(malformed(format!("the token `{token}` stands twice")));
        }
    }
    let mut merges = Vec::new();
    for merge in gguf.texts("tokenizer.ggml.merges")? {
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(malformed(format!("the merge `{merge}` is no pair")));
        };
        merges.push(json!([left, right]));
    }
    let added: Vec<Json> = added
        .iter()
        .map(|(id, flags)| {
            let mut token = Map::new();
            token.insert("id".to_owned(), (*id).into());
            token.extend(flags.as_object().cloned().unwrap_or_default());
            Json::Object(token)
        })
        .collect();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            ],
        },
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        },
    }))
}
