//! Chat templates and tokenizers: messages become the text and the token ids
//! that a model was trained on, exactly as Python renders them.
//!
//! Two promises. A rendered prompt equals the one of `transformers` byte for
//! byte. And in [`Chat::prompt_ids`] the text of a message is only ever text:
//! a user who types the model's own control tokens gets ordinary tokens.
//! Absent on purpose: HTTP, models, anything about one kind of turn.

mod control;
mod jinja;
mod message;
mod python;
mod tokenizer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

pub use jinja::Template;
pub use message::{
    enhanced_messages, flatten_content, is_envelope, last_request, normalize_messages,
    parse_arguments, person_text,
};
pub use python::strip;
pub use tokenizer::{Decoder, Tokenizer};

/// What can go wrong between messages and ids.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the model folder cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: std::io::Error,
    },
    /// A file of the model folder holds something else than it should.
    #[error("`{}` is not usable: {message}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The model folder has no chat template.
    #[error("`{}` has no chat template (neither `chat_template.jinja` nor `chat_template` in `tokenizer_config.json`)", folder.display())]
    NoTemplate {
        /// The model folder.
        folder: PathBuf,
    },
    /// The template itself is broken.
    #[error("chat template `{place}` line {line}: {message}")]
    Syntax {
        /// The file it stands in, or its name if it was given without one.
        place: String,
        /// Line in the template.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// The template refused the messages, or failed on them.
    #[error("chat template line {line}: {message}")]
    Render {
        /// Line in the template.
        line: usize,
        /// The template's own words.
        message: String,
    },
    /// A template that needs the arguments of a tool call as an object met a
    /// call that has none.
    #[error("message {message}: arguments of the call to `{tool}` are no JSON object: `{found}`")]
    ToolArguments {
        /// Message, counted from 0.
        message: usize,
        /// Name of the tool.
        tool: String,
        /// The arguments as they stand, shortened.
        found: String,
    },
    /// A message holds something that is no text.
    #[error("unsupported content: a part of type `{part}` is no text")]
    UnsupportedContent {
        /// Type of the part.
        part: String,
    },
    /// A message is no object.
    #[error("message {message} is no JSON object")]
    NotAMessage {
        /// Message, counted from 0.
        message: usize,
    },
    /// Text holds both control tokens and a character that is reserved for
    /// telling the template's control tokens from typed ones.
    #[error("text holds control tokens together with the reserved character U+{:X}", u32::from(*character))]
    Reserved {
        /// The character.
        character: char,
    },
    /// The tokenizer failed.
    #[error("tokenizer: {message}")]
    Tokenize {
        /// The tokenizer's own words.
        message: String,
    },
    /// A token id is out of range.
    #[error("token id {id} is not in the vocabulary")]
    UnknownId {
        /// The id.
        id: i64,
    },
}

/// What a template is given.
#[derive(Debug, Clone, Copy)]
pub struct Rendering<'a> {
    /// The conversation.
    pub messages: &'a [Value],
    /// Tool definitions, if the request had any.
    pub tools: Option<&'a [Value]>,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`).
    pub extra: &'a Map<String, Value>,
}

/// The tokenizer and the chat template of one model folder.
#[derive(Debug, Clone)]
pub struct Chat {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    template: Arc<Template>,
}

impl Chat {
    /// Loads both from a Hugging Face folder.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        let tokenizer = Tokenizer::load(folder)?;
        let template = Arc::new(Template::load(folder)?);
        Ok(Self { tokenizer, template })
    }

    /// Returns the template alone, which renders what it is given as it is.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Returns the SHA-256 of the template's source.
    pub fn template_hash(&self) -> String {
        self.template.hash()
    }

    /// Renders a conversation as a server does: list content is flattened,
    /// tool arguments that are the JSON text of an object become that object,
    /// `developer` becomes `system` where the template does not know it.
    pub fn render(&self, rendering: &Rendering<'_>) -> Result<String, Error> {
        let prepared = self.prepare(rendering)?;
        self.render_prepared(&prepared, rendering)
    }

    /// Returns the ids of the rendered conversation. Only the template can
    /// make control ids; the text of messages, tools and further variables
    /// never does.
    pub fn prompt_ids(&self, rendering: &Rendering<'_>) -> Result<Vec<i32>, Error> {
        let mut prepared = self.prepare(rendering)?;
        let controls = self.tokenizer.controls();
        if !prepared.values().any(|value| controls.occur_in(value)) {
            return self.tokenizer.encode(&self.render_prepared(&prepared, rendering)?);
        }
        for value in prepared.values_mut() {
            controls.shield(value)?;
        }
        let rendered = self.render_prepared(&prepared, rendering)?;
        self.tokenizer.encode_marked(&controls.mark(&rendered))
    }

    fn prepare(&self, rendering: &Rendering<'_>) -> Result<Prepared, Error> {
        let mut messages = match self.template.knows("developer") {
            true => message::flatten_messages(rendering.messages)?,
            false => normalize_messages(rendering.messages)?,
        };
        parse_arguments(&mut messages);
        Ok(Prepared {
            messages: Value::Array(messages),
            tools: rendering.tools.map_or(Value::Null, |tools| Value::Array(tools.to_vec())),
            extra: Value::Object(rendering.extra.clone()),
        })
    }

    fn render_prepared(
        &self,
        prepared: &Prepared,
        rendering: &Rendering<'_>,
    ) -> Result<String, Error> {
        let rendered = self.template.render(
            &prepared.messages,
            &prepared.tools,
            rendering.add_generation_prompt,
            prepared.extra.as_object().unwrap_or(rendering.extra),
        );
        // The template's own complaint about a string where it wants a mapping
        // says nothing to anybody; the call that has it does.
        rendered.map_err(|error| match &prepared.messages {
            Value::Array(messages) => message::unparsed_arguments(messages).unwrap_or(error),
            _ => error,
        })
    }
}

/// What goes into the template, after the changes that servers make.
struct Prepared {
    messages: Value,
    tools: Value,
    extra: Value,
}

impl Prepared {
    fn values(&self) -> impl Iterator<Item = &Value> {
        [&self.messages, &self.tools, &self.extra].into_iter()
    }

    fn values_mut(&mut self) -> impl Iterator<Item = &mut Value> {
        [&mut self.messages, &mut self.tools, &mut self.extra].into_iter()
    }
}
