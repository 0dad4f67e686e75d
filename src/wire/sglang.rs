//! The JSON of SGLang's HTTP dialect, as read from SGLang 0.5: what a client
//! may send and what the parts of an answer that oclaw reads look like. Members
//! that nobody here uses are left out; serde ignores them, as the server does.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Body of `POST /v1/chat/completions`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct ChatBody {
    /// Name of the model; any name is served.
    pub model: Option<String>,
    /// The conversation.
    #[serde(default)]
    pub messages: Vec<Value>,
    /// Tools the model may call.
    pub tools: Option<Vec<Value>>,
    /// `none`, `auto`, `required` or a named function.
    pub tool_choice: Option<Value>,
    /// Whether the answer comes as server-sent events.
    pub stream: Option<bool>,
    /// What a stream carries besides the deltas.
    pub stream_options: Option<StreamOptions>,
    /// Longest answer, in tokens.
    pub max_tokens: Option<i64>,
    /// The newer name of `max_tokens`; wins over it.
    pub max_completion_tokens: Option<i64>,
    /// Sampling temperature; 0 is greedy.
    pub temperature: Option<f64>,
    /// Nucleus of the distribution that may be sampled.
    pub top_p: Option<f64>,
    /// Number of candidates that may be sampled; -1 is all.
    pub top_k: Option<i64>,
    /// Least probability, as a share of the likeliest token's.
    pub min_p: Option<f64>,
    /// Seed of the sampler.
    pub seed: Option<i64>,
    /// Number of answers.
    pub n: Option<i64>,
    /// One stop string or several.
    pub stop: Option<Value>,
    /// Token ids that end the answer, besides the model's own.
    pub stop_token_ids: Option<Vec<i64>>,
    /// Whether the model's end tokens are ordinary ones.
    pub ignore_eos: Option<bool>,
    /// Whether the text keeps the stop string.
    pub no_stop_trim: Option<bool>,
    /// Whether special tokens stay out of the text.
    pub skip_special_tokens: Option<bool>,
    /// Whether log-probs are wanted.
    pub logprobs: Option<bool>,
    /// Number of alternatives per token.
    pub top_logprobs: Option<i64>,
    /// Adds `choices[].prompt_token_ids` and `response_token_ids`.
    pub return_token_ids: Option<bool>,
    /// Adds `choices[].prompt_token_ids`.
    pub return_prompt_token_ids: Option<bool>,
    /// Adds `choices[].meta_info`.
    pub return_meta_info: Option<bool>,
    /// Adds `sglext.input_ids`.
    pub return_input_ids_in_sglext: Option<bool>,
    /// Adds `sglext.output_ids`.
    pub return_output_ids_in_sglext: Option<bool>,
    /// The prompt's ids, instead of the rendered messages.
    pub input_ids: Option<Vec<i64>>,
    /// Variables of the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether what was thought is told apart from the answer; true.
    pub separate_reasoning: Option<bool>,
    /// Whether a stream tells it as it comes, not in one piece; true.
    pub stream_reasoning: Option<bool>,
    /// Name of the adapter that answers; one in `model` wins over it.
    pub lora_path: Option<String>,
    /// The caller's handle for `/abort_request`.
    pub rid: Option<String>,
    /// Every other member.
    #[serde(flatten)]
    pub further: Map<String, Value>,
}

/// Body of `POST /v1/completions`: a chat's, with a prompt in place of messages.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct CompletionBody {
    /// A text, a list of texts, a list of ids, or a list of such lists.
    #[serde(default)]
    pub prompt: Value,
    /// Number of alternatives per token; 0 tells the tokens' own log-probs alone.
    pub logprobs: Option<i64>,
    /// What a chat's body has, too.
    #[serde(flatten)]
    pub chat: ChatBody,
}

/// The `stream_options` of a chat.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct StreamOptions {
    /// Whether a last chunk carries the usage.
    pub include_usage: Option<bool>,
}

/// Body of `POST /generate`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct GenerateBody {
    /// A text, or a list of them.
    pub text: Option<Value>,
    /// A list of ids, or a list of such lists.
    pub input_ids: Option<Value>,
    /// How to sample.
    pub sampling_params: Option<SamplingBody>,
    /// Whether log-probs are wanted.
    pub return_logprob: Option<bool>,
    /// First prompt position whose log-prob is wanted; -1 is none.
    pub logprob_start_len: Option<i64>,
    /// Number of alternatives per position.
    pub top_logprobs_num: Option<i64>,
    /// Ids whose log-probs are wanted at each position.
    pub token_ids_logprob: Option<Vec<i64>>,
    /// Whether the triples carry the token's text.
    pub return_text_in_logprobs: Option<bool>,
    /// Adds `prompt_token_ids`.
    pub return_prompt_token_ids: Option<bool>,
    /// Whether the answer comes as server-sent events.
    pub stream: Option<bool>,
    /// Name of the adapter that answers, or a list with one for each prompt.
    pub lora_path: Option<Value>,
    /// The caller's handle for `/abort_request`.
    pub rid: Option<Value>,
    /// Every other member.
    #[serde(flatten)]
    pub further: Map<String, Value>,
}

/// The `sampling_params` of `/generate`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct SamplingBody {
    /// Longest answer, in tokens; 0 scores the prompt only.
    pub max_new_tokens: Option<i64>,
    /// Sampling temperature; 0 is greedy.
    pub temperature: Option<f64>,
    /// Nucleus of the distribution that may be sampled.
    pub top_p: Option<f64>,
    /// Number of candidates that may be sampled; -1 is all.
    pub top_k: Option<i64>,
    /// Least probability, as a share of the likeliest token's.
    pub min_p: Option<f64>,
    /// Seed of the sampler.
    pub sampling_seed: Option<i64>,
    /// Number of answers per prompt.
    pub n: Option<i64>,
    /// One stop string or several.
    pub stop: Option<Value>,
    /// Token ids that end the answer, besides the model's own.
    pub stop_token_ids: Option<Vec<i64>>,
    /// Whether the model's end tokens are ordinary ones.
    pub ignore_eos: Option<bool>,
    /// Whether the text keeps the stop string.
    pub no_stop_trim: Option<bool>,
    /// Whether special tokens stay out of the text.
    pub skip_special_tokens: Option<bool>,
    /// Every other member.
    #[serde(flatten)]
    pub further: Map<String, Value>,
}

/// Body of `POST /tokenize`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct TokenizeBody {
    /// Plain text.
    pub prompt: Option<String>,
    /// A conversation, rendered as the chat route does.
    pub messages: Option<Vec<Value>>,
    /// Tools the template shows.
    pub tools: Option<Vec<Value>>,
    /// Variables of the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the render ends where the model goes on; true.
    pub add_generation_prompt: Option<bool>,
}

/// Body of `POST /detokenize`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct DetokenizeBody {
    /// The ids.
    pub tokens: Vec<i64>,
    /// Whether special tokens stay out of the text; true.
    pub skip_special_tokens: Option<bool>,
}

/// Body of `POST /update_weights_from_disk`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct UpdateBody {
    /// Folder that the server can read.
    pub model_path: String,
    /// Version that answers carry from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_version: Option<String>,
    /// Whether running requests are ended instead of carried over.
    #[serde(default)]
    pub abort_all_requests: bool,
    /// Whether the prefix cache is emptied.
    #[serde(default = "yes")]
    pub flush_cache: bool,
}

fn yes() -> bool {
    true
}

/// Body of `POST /update_weight_version`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct VersionBody {
    /// Version that answers carry from then on.
    pub new_version: String,
    /// Whether running requests are ended; true.
    #[serde(default = "yes")]
    pub abort_all_requests: bool,
}

/// Body of `POST /load_lora_adapter`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct LoadAdapterBody {
    /// What requests call it.
    pub lora_name: String,
    /// Folder that the server can read.
    pub lora_path: String,
}

/// Body of `POST /unload_lora_adapter`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct UnloadAdapterBody {
    /// What requests called it.
    pub lora_name: String,
}

/// Body of `POST /pause_generation`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct PauseBody {
    /// What happens to running requests; `abort` if nothing is said.
    #[serde(default)]
    pub mode: PauseMode,
}

/// What a pause does to running requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", expecting = "one of `abort`, `in_place`, `retract`")]
pub enum PauseMode {
    /// Ends them.
    #[default]
    Abort,
    /// Freezes them with their caches.
    InPlace,
    /// Puts them back into the queue; their caches are computed again.
    Retract,
}

/// Body of `POST /abort_request`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct AbortBody {
    /// The request to end.
    pub rid: Option<String>,
    /// Whether every request ends.
    #[serde(default)]
    pub abort_all: bool,
}

/// Answer of the control routes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Whether it was done; servers also answer 200 when it was not.
    pub success: Option<bool>,
    /// What the server has to say.
    pub message: Option<String>,
}

/// Answer of `GET /model_info`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Folder or hub name of the weights.
    pub model_path: Option<String>,
    /// Folder or hub name of the tokenizer, if it is not the model's.
    pub tokenizer_path: Option<String>,
    /// Name under which the model is served.
    pub served_model_name: Option<String>,
    /// Version of the weights, as its last pusher named it.
    pub weight_version: Option<String>,
}

/// One token with its log-prob: `[logprob or null, id, text or null]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogProb(pub Option<f64>, pub i64, pub Option<String>);

/// A list of tokens for each position, null where nothing is known.
pub type TokenLogProbs = Vec<Option<Vec<TokenLogProb>>>;

/// The parts of `meta_info` that oclaw reads.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct MetaInfo {
    /// Version of the weights that answered.
    pub weight_version: Option<String>,
    /// Length of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Log-probs of the prompt from `logprob_start_len` on; the first is null.
    pub input_token_logprobs: Option<Vec<TokenLogProb>>,
    /// The likeliest tokens at the same positions.
    pub input_top_logprobs: Option<TokenLogProbs>,
    /// The tokens of `token_ids_logprob` at the same positions.
    pub input_token_ids_logprobs: Option<TokenLogProbs>,
    /// Log-probs of the answer.
    pub output_token_logprobs: Option<Vec<TokenLogProb>>,
}

/// Answer of `POST /generate` for one prompt.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct GenerateAnswer {
    /// The answer's text.
    #[serde(default)]
    pub text: String,
    /// The answer's ids.
    #[serde(default)]
    pub output_ids: Vec<i64>,
    /// Everything else.
    pub meta_info: Option<MetaInfo>,
}
