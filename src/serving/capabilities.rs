//! What becomes of each field of a request: of those that SGLang and OpenAI's clients
//! know, route by route. What is refused is refused by the same table.

use super::unsupported::{MEMBERS, Place};

use Place::{Chat, Completion, Generate, Sampling};

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It does what it says.
    Honoured,
    /// Only a value that changes nothing passes; any other is refused by name.
    NeutralOnly,
    /// It changes nothing.
    Ignored,
    /// The whole route is not there.
    NoRoute,
}

impl Standing {
    /// Returns it in words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::NeutralOnly => "neutral value only",
            Self::Ignored => "ignored",
            Self::NoRoute => "no such route",
        }
    }
}

/// One field of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Capability {
    /// The path, and within its body the object in which the field stands.
    pub route: &'static str,
    /// Its name; `*` stands for every one.
    pub field: &'static str,
    /// What becomes of it.
    pub standing: Standing,
    /// Why, and what to do; empty if it is honoured.
    pub note: &'static str,
}

impl Place {
    fn route(self) -> &'static str {
        match self {
            Chat => "/v1/chat/completions",
            Completion => "/v1/completions",
            Generate => "/generate",
            Sampling => "/generate sampling_params",
        }
    }
}

/// Fields that chats and completions share.
const COMMON: &str = "model stream stream_options max_tokens max_completion_tokens temperature \
    top_p top_k min_p seed n stop stop_token_ids ignore_eos no_stop_trim skip_special_tokens \
    logprobs return_token_ids return_prompt_token_ids return_meta_info \
    return_input_ids_in_sglext return_output_ids_in_sglext lora_path rid";

const HONOURED: &[(&str, &str)] = &[
    ("/v1/chat/completions", COMMON),
    (
        "/v1/chat/completions",
        "messages tools tool_choice top_logprobs input_ids chat_template_kwargs \
         separate_reasoning stream_reasoning",
    ),
    ("/v1/completions", COMMON),
    ("/v1/completions", "prompt"),
    (
        "/generate",
        "text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num \
         token_ids_logprob return_text_in_logprobs return_prompt_token_ids stream lora_path rid",
    ),
    (
        "/generate sampling_params",
        "max_new_tokens temperature top_p top_k min_p sampling_seed n stop stop_token_ids \
         ignore_eos no_stop_trim skip_special_tokens",
    ),
    ("/tokenize", "prompt messages tools chat_template_kwargs add_generation_prompt"),
    ("/detokenize", "tokens skip_special_tokens"),
    ("/pause_generation", "mode"),
    ("/update_weights_from_disk", "model_path weight_version abort_all_requests"),
    ("/update_weight_version", "new_version abort_all_requests"),
    ("/load_lora_adapter", "lora_name lora_path"),
    ("/unload_lora_adapter", "lora_name"),
    ("/abort_request", "rid abort_all"),
];

const CACHES: &str = "beginnings that were computed are found by their ids, whoever asks";
const ORDER: &str = "requests are answered in the order in which they came";
const RECORDS: &str = "it is for the server's records, and there are none";
const PROCESSORS: &str = "it is for a logit processor, and there is none";
const PLACEMENT: &str = "it is about how SGLang loads, which is not how this engine does";

const IGNORED: &[(&str, &str, &str)] = &[
    ("/v1/chat/completions", "session_id cache_salt extra_key prompt_cache_key", CACHES),
    ("/v1/chat/completions", "priority service_tier", ORDER),
    ("/v1/chat/completions", "user metadata store", RECORDS),
    ("/v1/chat/completions", "custom_params", PROCESSORS),
    (
        "/v1/chat/completions",
        "parallel_tool_calls reasoning_effort verbosity",
        "the model decides; say it in the messages, or by `chat_template_kwargs`",
    ),
    ("/v1/completions", "session_id cache_salt extra_key", CACHES),
    ("/v1/completions", "priority", ORDER),
    ("/v1/completions", "user", RECORDS),
    ("/v1/completions", "custom_params", PROCESSORS),
    ("/generate", "priority", ORDER),
    (
        "/generate",
        "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 \
         return_flat_raw_output_top_logprobs",
        "log-probs come as lists: use `top_logprobs_num`",
    ),
    ("/generate", "return_hidden_states return_routed_experts", "the answer does not have them"),
    ("/generate sampling_params", "custom_params", PROCESSORS),
    (
        "/generate sampling_params",
        "spaces_between_special_tokens",
        "special tokens stand as the vocabulary spells them",
    ),
    ("/tokenize", "add_special_tokens", "a text becomes its own ids and no others"),
    ("/continue_generation", "torch_empty_cache", PLACEMENT),
    (
        "/update_weights_from_disk",
        "flush_cache",
        "what old weights have computed is always dropped",
    ),
    (
        "/update_weights_from_disk",
        "load_format is_async torch_empty_cache keep_pause recapture_cuda_graph token_step manifest",
        PLACEMENT,
    ),
    ("/load_lora_adapter", "pinned", "an adapter stays until it is unloaded"),
    ("/flush_cache", "timeout", "there is nothing to wait for"),
];

const WEIGHTS: &str = "weights come from a folder: use `/update_weights_from_disk`";
const NO_ROUTE: &[(&str, &str)] = &[
    ("/v1/embeddings", "the model generates: the route answers 400"),
    ("/update_weights_from_tensor", WEIGHTS),
    ("/init_weights_update_group", WEIGHTS),
    ("/destroy_weights_update_group", WEIGHTS),
    ("/update_weights_from_distributed", WEIGHTS),
    ("/begin_weight_update", WEIGHTS),
    ("/end_weight_update", WEIGHTS),
    ("/load_lora_adapter_from_tensors", "adapters come from a folder: use `/load_lora_adapter`"),
    ("/release_memory_occupation", "the memory is held while the engine runs: stop it"),
    ("/resume_memory_occupation", "the memory is held while the engine runs: stop it"),
];

/// Lists every field that is known, by route and what becomes of it.
pub fn capabilities() -> Vec<Capability> {
    let mut all = Vec::new();
    for (route, fields) in HONOURED {
        all.extend(of_words(route, fields, Standing::Honoured, ""));
    }
    for member in MEMBERS {
        all.extend(member.places.iter().map(|place| Capability {
            route: place.route(),
            field: member.name,
            standing: Standing::NeutralOnly,
            note: member.reason,
        }));
    }
    for (route, fields, note) in IGNORED {
        all.extend(of_words(route, fields, Standing::Ignored, note));
    }
    for (route, note) in NO_ROUTE {
        all.extend(of_words(route, "*", Standing::NoRoute, note));
    }
    // Routes in the order above, and each in one piece.
    let mut routes: Vec<_> = all.iter().map(|capability| capability.route).collect();
    let mut seen = std::collections::BTreeSet::new();
    routes.retain(|route| seen.insert(*route));
    all.sort_by_key(|capability| routes.iter().position(|route| *route == capability.route));
    all
}

fn of_words(
    route: &'static str,
    fields: &'static str,
    standing: Standing,
    note: &'static str,
) -> impl Iterator<Item = Capability> {
    fields.split_whitespace().map(move |field| Capability { route, field, standing, note })
}
