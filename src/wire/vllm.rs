//! The JSON of vLLM's HTTP dialect, as far as oclaw reads it.

use std::collections::HashMap;

use serde::Deserialize;

/// Answer of `POST /v1/completions`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct CompletionAnswer {
    /// One per prompt and answer.
    #[serde(default)]
    pub choices: Vec<CompletionChoice>,
}

/// One answer to one prompt.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct CompletionChoice {
    /// The prompt, if `return_token_ids` asked for it.
    pub prompt_token_ids: Option<Vec<i32>>,
    /// What is told of each token of the prompt; null for the first.
    pub prompt_logprobs: Option<Vec<Option<PromptLogProbs>>>,
}

/// The log-probs at one position by token id, written as a string.
pub type PromptLogProbs = HashMap<String, PromptLogProb>;

/// One of them.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct PromptLogProb {
    /// The log-prob; -9999 is the logarithm of 0.
    pub logprob: Option<f64>,
    /// Place in the order of likelihood, from 1.
    pub rank: Option<i64>,
}
