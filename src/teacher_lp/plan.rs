//! The ids that a turn's response is scored under.

use serde_json::{Map, Value};

use crate::template::{Chat, Error as TemplateError, Rendering, enhanced_messages};
use crate::trajectory::Turn;

/// Prompt and response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) ids: Vec<i32>,
    /// Where the response begins.
    pub(super) start: usize,
}

/// What all hints of a turn share.
pub(super) struct Plan<'a> {
    chat: &'a Chat,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    /// The prompt's ids as the server had them, if it told.
    sampled: Option<&'a [i32]>,
    response: &'a [i32],
    /// Ids that stood between the rendered prompt and the response, such as an
    /// answer's beginning that the client forced or an empty thinking block.
    continuation: Vec<i32>,
}

impl<'a> Plan<'a> {
    pub(super) fn of(turn: &'a Turn, chat: &'a Chat) -> Result<Self, String> {
        let parse = |column: &str, text: &str| {
            let list: Result<Vec<Value>, _> = serde_json::from_str(text);
            list.map_err(|error| format!("`{column}` is no JSON list: {error}"))
        };
        let mut plan = Self {
            chat,
            messages: parse("messages", &turn.messages)?,
            tools: turn.tools.as_deref().map(|tools| parse("tools", tools)).transpose()?,
            sampled: turn.prompt_ids.as_deref(),
            response: turn.response_ids.as_deref().unwrap_or_default(),
            continuation: Vec::new(),
        };
        if let Some(sampled) = plan.sampled {
            let rendered = plan.as_rendered().map_err(reason)?;
            let guarded = plan.prompt(&plan.messages).map_err(reason)?;
            let rest = |prompt: &[i32]| sampled.strip_prefix(prompt).map(<[i32]>::to_vec);
            plan.continuation = rest(&rendered).or_else(|| rest(&guarded)).unwrap_or_default();
        }
        Ok(plan)
    }

    /// Returns the response under the prompt with a hint.
    pub(super) fn hinted(&self, hint: &str) -> Result<Sequence, String> {
        let enhanced = enhanced_messages(&self.messages, hint).map_err(reason)?;
        let mut prompt = self.prompt(&enhanced).map_err(reason)?;
        prompt.extend_from_slice(&self.continuation);
        Ok(self.answered(prompt))
    }

    /// Returns the response under the prompt as it was.
    pub(super) fn plain(&self) -> Result<Sequence, String> {
        let prompt = match self.sampled {
            Some(sampled) => sampled.to_vec(),
            None => self.prompt(&self.messages).map_err(reason)?,
        };
        Ok(self.answered(prompt))
    }

    fn answered(&self, prompt: Vec<i32>) -> Sequence {
        let start = prompt.len();
        let ids = [&prompt, self.response].concat();
        Sequence { ids, start }
    }

    fn prompt(&self, messages: &[Value]) -> Result<Vec<i32>, TemplateError> {
        self.chat.prompt_ids(&self.rendering(messages, &Map::new()))
    }

    /// The plain prompt as a server tokenises it, typed control tokens and all.
    fn as_rendered(&self) -> Result<Vec<i32>, TemplateError> {
        let text = self.chat.render(&self.rendering(&self.messages, &Map::new()))?;
        self.chat.tokenizer.encode(&text)
    }

    fn rendering<'b>(
        &'b self,
        messages: &'b [Value],
        extra: &'b Map<String, Value>,
    ) -> Rendering<'b> {
        Rendering { messages, tools: self.tools.as_deref(), add_generation_prompt: true, extra }
    }
}

fn reason(error: TemplateError) -> String {
    match error {
        TemplateError::UnsupportedContent { .. } => "unsupported_content".to_owned(),
        other => other.to_string(),
    }
}
