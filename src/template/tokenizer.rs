//! The tokenizer of a model folder.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};
use tokenizers::AddedToken;
use tokenizers::tokenizer::step_decode_stream;

use super::Error;
use super::control::Controls;

/// A tokenizer; copies share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    tokenizer: tokenizers::Tokenizer,
    controls: Controls,
    /// Knows the marks of [`Controls`] instead of the control tokens. Made when
    /// somebody types a control token, which is rare.
    marked: OnceLock<Result<Marked, String>>,
    hash: String,
}

struct Marked {
    tokenizer: tokenizers::Tokenizer,
    /// Id of a mark and the id of its control token.
    ids: Vec<(u32, u32)>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Tokenizer").field("hash", &self.shared.hash).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a Hugging Face folder.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("tokenizer.json");
        let bytes =
            std::fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
        Self::from_bytes(&bytes).map_err(|message| Error::Malformed { path, message })
    }

    /// Returns the hash of a folder's tokenizer without loading it.
    pub fn hash_of(folder: &Path) -> Result<String, Error> {
        let path = folder.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| Error::Read { path, source })?;
        Ok(hash(&bytes))
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let words = |error: tokenizers::Error| error.to_string();
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(words)?;
        // A file may ask for both; nothing here is cut or filled up silently.
        tokenizer.with_truncation(None).map_err(words)?;
        tokenizer.with_padding(None);
        let controls = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| is_control(token))
            .map(|(id, token)| (token.content, id))
            .collect();
        let controls = Controls::new(controls)?;
        let shared = Shared { tokenizer, controls, marked: OnceLock::new(), hash: hash(bytes) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the ids of a text. Control tokens in it become control ids: for
    /// text that a template rendered or a client meant as a prompt.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>, Error> {
        signed(self.shared.tokenizer.encode_fast(text, false).map_err(failed)?.get_ids())
    }

    /// Returns the ids of a text that is only text: control tokens in it
    /// become ordinary ids.
    pub fn encode_text(&self, text: &str) -> Result<Vec<i32>, Error> {
        let marked = self.marked()?;
        signed(marked.tokenizer.encode_fast(text, false).map_err(failed)?.get_ids())
    }

    /// Returns the ids of a text in which control tokens stand as marks.
    pub(super) fn encode_marked(&self, text: &str) -> Result<Vec<i32>, Error> {
        let marked = self.marked()?;
        let encoding = marked.tokenizer.encode_fast(text, false).map_err(failed)?;
        let control = |id: u32| {
            let found = marked.ids.iter().find(|(mark, _)| *mark == id);
            found.map_or(id, |(_, control)| *control)
        };
        let ids: Vec<_> = encoding.get_ids().iter().map(|id| control(*id)).collect();
        signed(&ids)
    }

    fn marked(&self) -> Result<&Marked, Error> {
        let marked = self.shared.marked.get_or_init(|| self.make_marked());
        marked.as_ref().map_err(|message| Error::Tokenize { message: message.clone() })
    }

    fn make_marked(&self) -> Result<Marked, String> {
        let mut tokenizer = self.shared.tokenizer.clone();
        let known = tokenizer.get_added_tokens_decoder();
        let mut marks = Vec::new();
        let mut plain = Vec::new();
        for (mark, id, _) in self.shared.controls.marks() {
            if let Some(token) = known.get(&id) {
                let mut renamed = token.clone();
                renamed.content = mark.to_string();
                renamed.special = false;
                renamed.normalized = false;
                marks.push((renamed, id));
                plain.push(AddedToken { special: true, ..token.clone() });
            }
        }
        let words = |error: tokenizers::Error| error.to_string();
        // "Encode special tokens" means: as any other text.
        tokenizer.set_encode_special_tokens(true);
        tokenizer.add_special_tokens(plain).map_err(words)?;
        tokenizer.add_tokens(marks.iter().map(|(token, _)| token.clone())).map_err(words)?;
        let id_of =
            |(token, id): &(AddedToken, u32)| Some((tokenizer.token_to_id(&token.content)?, *id));
        let ids = marks.iter().filter_map(id_of).collect();
        Ok(Marked { tokenizer, ids })
    }

    /// Tells whether a text spells a control token.
    pub fn has_control(&self, text: &str) -> bool {
        self.shared.controls.occur_in_text(text)
    }

    pub(super) fn controls(&self) -> &Controls {
        &self.shared.controls
    }

    /// Returns the text of ids, with or without the special tokens.
    pub fn decode(&self, ids: &[i32], skip_special: bool) -> Result<String, Error> {
        let unsigned =
            |id: &i32| u32::try_from(*id).map_err(|_| Error::UnknownId { id: i64::from(*id) });
        let ids: Vec<u32> = ids.iter().map(unsigned).collect::<Result<_, _>>()?;
        self.shared.tokenizer.decode(&ids, skip_special).map_err(failed)
    }

    /// Returns a decoder for ids that come one by one.
    pub fn decoder(&self, skip_special: bool) -> Decoder {
        Decoder {
            tokenizer: self.clone(),
            skip_special,
            ids: Vec::new(),
            prefix: String::new(),
            prefix_index: 0,
        }
    }

    /// Returns the id of a token.
    pub fn id_of(&self, token: &str) -> Option<i32> {
        self.shared.tokenizer.token_to_id(token).and_then(|id| i32::try_from(id).ok())
    }

    /// Returns the token of an id, as the vocabulary spells it.
    pub fn token_of(&self, id: i32) -> Option<String> {
        self.shared.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// Tells whether an id is a special token.
    pub fn is_special(&self, id: i32) -> bool {
        let token = self.token_of(id);
        token.is_some_and(|token| {
            self.shared.tokenizer.get_added_vocabulary().is_special_token(&token)
        })
    }

    /// Returns the number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.shared.tokenizer.get_vocab_size(true)
    }

    /// Returns the SHA-256 of `tokenizer.json`.
    pub fn hash(&self) -> String {
        self.shared.hash.clone()
    }
}

/// Tells whether a token steers a chat: every special token, and those that
/// some vocabularies forget to call special but spell between bars.
fn is_control(token: &AddedToken) -> bool {
    let barred = |bar: char| {
        let text = token.content.strip_prefix('<').and_then(|text| text.strip_suffix('>'));
        text.is_some_and(|text| {
            text.len() > 2 * bar.len_utf8() && text.starts_with(bar) && text.ends_with(bar)
        })
    };
    token.special || barred('|') || barred('｜')
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Tokenize { message: error.to_string() }
}

fn signed(ids: &[u32]) -> Result<Vec<i32>, Error> {
    let signed = |id: &u32| i32::try_from(*id).map_err(|_| Error::UnknownId { id: i64::from(*id) });
    ids.iter().map(signed).collect()
}

/// Turns ids into text one by one, holding text back while a character is
/// incomplete.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl Decoder {
    /// Takes an id and returns the text that it completes, if any.
    pub fn step(&mut self, id: i32) -> Option<String> {
        let Ok(id) = u32::try_from(id) else {
            return None;
        };
        let step = step_decode_stream(
            &self.tokenizer.shared.tokenizer,
            vec![id],
            self.skip_special,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        );
        match step {
            Ok(text) => text,
            // The text so far changed under later ids, which byte-level
            // vocabularies never do: go on from here.
            Err(_) => {
                self.ids.clear();
                self.prefix.clear();
                self.prefix_index = 0;
                self.tokenizer.shared.tokenizer.decode(&[id], self.skip_special).ok()
            }
        }
    }

    /// Returns what was still held back: an incomplete character, as U+FFFD.
    pub fn finish(self) -> Option<String> {
        let text = self.tokenizer.shared.tokenizer.decode(&self.ids, self.skip_special).ok()?;
        let rest = text.strip_prefix(&self.prefix)?;
        (!rest.is_empty()).then(|| rest.to_owned())
    }
}
