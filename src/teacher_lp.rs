//! The teacher's log-probs: the same answer, token by token, had the prompt held
//! the hint.
//!
//! The input of the teacher is the ids of the enhanced prompt followed by the
//! stored response ids, unchanged. Nothing is tokenised again, padded or cut;
//! what fails for one hint fails for it alone and says why. Absent on purpose:
//! who computes the numbers; the caller brings a scorer.

use serde_json::{Map, Value};

use crate::template::{Chat, Error as TemplateError, Rendering, enhanced_messages};
use crate::trajectory::Turn;
use crate::trajectory::words::LogProbKind;

/// What to score.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreRequest {
    /// Prompt and response.
    pub ids: Vec<i32>,
    /// Where the response begins.
    pub start: usize,
    /// What the logits are divided by; 1 leaves them as they are.
    pub temperature: f32,
}

/// Who is asked.
#[derive(Debug, Clone, Copy)]
pub struct Teacher<'a> {
    /// Template and tokenizer of the policy, which the teacher shares.
    pub chat: &'a Chat,
    /// Name for the column.
    pub name: &'a str,
    /// Whether it can divide logits by a temperature; one that cannot is raw.
    pub tempers: bool,
}

/// Tells whether a turn has what the teacher needs: hints, and ids as sampled.
pub fn is_taught(turn: &Turn) -> bool {
    let some = |length: Option<usize>| length.is_some_and(|length| length > 0);
    some(turn.hints.as_ref().map(Vec::len)) && some(turn.response_ids.as_ref().map(Vec::len))
}

/// Takes the teacher's columns off a turn: nothing to teach, nothing failed.
pub fn clear(turn: &mut Turn) {
    turn.teacher = None;
    turn.teacher_temperature = None;
    turn.student_version = None;
    turn.topk = None;
    turn.teacher_log_probs = None;
    turn.teacher_topk_ids = None;
    turn.teacher_topk_log_probs = None;
    turn.teacher_at_student = None;
    turn.student_topk_ids = None;
    turn.student_topk_log_probs = None;
    turn.teacher_error = None;
}

/// Fills the teacher's columns of one turn.
pub async fn teach<E: std::fmt::Display>(
    mut turn: Turn,
    teacher: &Teacher<'_>,
    score: impl AsyncFn(ScoreRequest) -> Result<Vec<f32>, E>,
) -> Turn {
    clear(&mut turn);
    if !is_taught(&turn) {
        return turn;
    }
    let temperature = if teacher.tempers { temperature(&turn) } else { 1.0 };
    let hints = turn.hints.clone().unwrap_or_default();
    let plan = Plan::of(&turn, teacher.chat);
    let mut log_probs = Vec::with_capacity(hints.len());
    let mut errors = Vec::with_capacity(hints.len());
    for hint in &hints {
        let outcome = match plan.as_ref().map_err(Clone::clone).and_then(|plan| plan.request(hint))
        {
            Ok(request) => {
                let request = ScoreRequest { temperature, ..request };
                let wanted = request.ids.len() - request.start;
                match score(request).await {
                    Ok(values) => checked(values, wanted),
                    Err(error) => Err(error.to_string()),
                }
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(values) => {
                log_probs.push(Some(values));
                errors.push(None);
            }
            Err(error) => {
                log_probs.push(None);
                errors.push(Some(error));
            }
        }
    }
    turn.teacher = Some(teacher.name.to_owned());
    turn.teacher_temperature = Some(temperature);
    turn.teacher_log_probs = Some(log_probs);
    turn.teacher_error = Some(errors);
    turn
}

/// Returns the temperature at which the teacher must be compared: the sampling
/// temperature where the stored log-probs are of tempered logits, else 1.
/// Greedy sampling counts as 1.
pub fn temperature(turn: &Turn) -> f32 {
    match (turn.sampling.log_prob_kind, turn.sampling.temperature) {
        (LogProbKind::Tempered, Some(temperature)) if temperature > 0.0 => temperature,
        _ => 1.0,
    }
}

/// What all hints of a turn share.
struct Plan<'a> {
    chat: &'a Chat,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    response: &'a [i32],
    /// Ids that stood between the rendered prompt and the response, such as an
    /// answer's beginning that the client forced or an empty thinking block.
    continuation: Vec<i32>,
}

impl<'a> Plan<'a> {
    fn of(turn: &'a Turn, chat: &'a Chat) -> Result<Self, String> {
        let parse = |column: &str, text: &str| {
            let list: Result<Vec<Value>, _> = serde_json::from_str(text);
            list.map_err(|error| format!("`{column}` is no JSON list: {error}"))
        };
        let mut plan = Self {
            chat,
            messages: parse("messages", &turn.messages)?,
            tools: turn.tools.as_deref().map(|tools| parse("tools", tools)).transpose()?,
            response: turn.response_ids.as_deref().unwrap_or_default(),
            continuation: Vec::new(),
        };
        if let Some(sampled) = &turn.prompt_ids {
            let rendered = plan.as_rendered().map_err(reason)?;
            let guarded = plan.prompt(&plan.messages).map_err(reason)?;
            let rest = |prompt: &[i32]| sampled.strip_prefix(prompt).map(<[i32]>::to_vec);
            plan.continuation = rest(&rendered).or_else(|| rest(&guarded)).unwrap_or_default();
        }
        Ok(plan)
    }

    fn request(&self, hint: &str) -> Result<ScoreRequest, String> {
        let enhanced = enhanced_messages(&self.messages, hint).map_err(reason)?;
        let mut ids = self.prompt(&enhanced).map_err(reason)?;
        ids.extend_from_slice(&self.continuation);
        let start = ids.len();
        ids.extend_from_slice(self.response);
        Ok(ScoreRequest { ids, start, temperature: 1.0 })
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

/// One value for each response token, each a log-prob, or no signal at all.
fn checked(values: Vec<f32>, wanted: usize) -> Result<Vec<f32>, String> {
    if values.len() != wanted {
        return Err(format!("{} log-probs for {wanted} tokens", values.len()));
    }
    match values.iter().position(|value| !value.is_finite()) {
        Some(position) => Err(format!("log-prob {position} is {}", values[position])),
        None => Ok(values),
    }
}

fn reason(error: TemplateError) -> String {
    match error {
        TemplateError::UnsupportedContent { .. } => "unsupported_content".to_owned(),
        other => other.to_string(),
    }
}
