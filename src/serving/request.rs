//! From a request's body to a plan: defaults, limits, refusals.

use serde_json::{Map, Value};

use crate::model::{Cache, Config, SamplingParams};
use crate::wire::sglang::{ChatBody, CompletionBody, GenerateBody, SamplingBody};

use super::answer::decimal;
use super::compute::Plan;
use super::failure::Failure;
use super::routes::Served;
use super::text::Stops;
use super::unsupported::{self, Place};

/// Most answers to one request.
pub(super) const MOST_ANSWERS: i64 = 128;
/// Most prompts of one request, and most answers to all of them.
const MOST_PROMPTS: usize = 4096;
/// Most log-probs that `token_ids_logprob` may ask for in one request.
const MOST_CHOSEN: usize = 4 << 20;
/// Most stop strings, and most bytes of one: each is looked for after every token.
const MOST_STOPS: usize = 64;
const LONGEST_STOP: usize = 4 << 10;
/// Most ids that end an answer, besides the model's own.
const MOST_STOP_IDS: usize = 1024;
/// Longest name that a request may give: it stands in every event of an answer, in the
/// answers to all prompts, and those of weights and adapters stay.
const LONGEST_NAME: usize = 4 << 10;
/// Most alternatives per token.
const MOST_TOP: i64 = 64;
/// Highest temperature: hotter than this all tokens are alike, and f32 ends.
const MOST_TEMPERATURE: f64 = 1000.0;
/// Longest answer of `/generate` if nothing is said, as in SGLang.
const GENERATE_DEFAULT: i64 = 128;
/// The same of `/v1/completions`, as in OpenAI's.
const COMPLETION_DEFAULT: i64 = 16;

/// What a request says about sampling, whichever route it came by.
#[derive(Debug, Clone, Default)]
pub(super) struct Wishes {
    pub(super) body: SamplingBody,
    pub(super) top: Option<i64>,
    pub(super) chosen: Vec<i64>,
}

impl Wishes {
    /// Reads a chat's body.
    pub(super) fn of_chat(body: &ChatBody) -> Result<Self, Failure> {
        unsupported::refuse(&body.further, Place::Chat)?;
        let top = bounded_top("top_logprobs", body.top_logprobs)?;
        Self::of_body(body, top.filter(|_| body.logprobs == Some(true)))
    }

    /// Reads a completion's body.
    pub(super) fn of_completion(body: &CompletionBody) -> Result<Self, Failure> {
        unsupported::refuse(&body.chat.further, Place::Completion)?;
        let top = bounded_top("logprobs", body.logprobs)?;
        let mut wishes = Self::of_body(&body.chat, top)?;
        wishes.body.max_new_tokens.get_or_insert(COMPLETION_DEFAULT);
        Ok(wishes)
    }

    fn of_body(body: &ChatBody, top: Option<i64>) -> Result<Self, Failure> {
        let longest = match (body.max_completion_tokens, body.max_tokens) {
            (Some(longest), _) => Some(("max_completion_tokens", longest)),
            (None, longest) => longest.map(|longest| ("max_tokens", longest)),
        };
        if let Some((name, longest @ ..1)) = longest {
            let message = format!("`{name}` is {longest}; an answer has 1 token or more");
            return Err(Failure::of(name, message));
        }
        Ok(Self {
            body: SamplingBody {
                max_new_tokens: longest.map(|(_, longest)| longest),
                temperature: body.temperature,
                top_p: body.top_p,
                top_k: body.top_k,
                min_p: body.min_p,
                sampling_seed: body.seed,
                n: body.n,
                stop: body.stop.clone(),
                stop_token_ids: body.stop_token_ids.clone(),
                ignore_eos: body.ignore_eos,
                no_stop_trim: body.no_stop_trim,
                skip_special_tokens: body.skip_special_tokens,
                further: Map::new(),
            },
            top,
            chosen: Vec::new(),
        })
    }

    /// Returns the wishes of `/generate`, whose answers have a default length.
    pub(super) fn of_generate(body: &GenerateBody) -> Result<Self, Failure> {
        unsupported::refuse(&body.further, Place::Generate)?;
        let mut sampling = body.sampling_params.clone().unwrap_or_default();
        unsupported::refuse(&sampling.further, Place::Sampling)?;
        sampling.max_new_tokens.get_or_insert(GENERATE_DEFAULT);
        let wanted = body.return_logprob == Some(true);
        let chosen = body.token_ids_logprob.as_deref().filter(|_| wanted).unwrap_or_default();
        check_chosen(chosen.len(), 1)?;
        Ok(Self {
            body: sampling,
            top: bounded_top("top_logprobs_num", body.top_logprobs_num)?.filter(|_| wanted),
            chosen: chosen.to_vec(),
        })
    }

    /// Returns the number of answers.
    pub(super) fn answers(&self) -> Result<usize, Failure> {
        match self.body.n.unwrap_or(1) {
            n @ 1..=MOST_ANSWERS => Ok(n as usize),
            n => Err(Failure::of("n", format!("`n` is {n}; it may be 1 to {MOST_ANSWERS}"))),
        }
    }

    /// Returns the stop strings.
    pub(super) fn stops(&self) -> Result<Stops, Failure> {
        let keep = self.body.no_stop_trim == Some(true);
        let wrong = || Failure::bad("`stop` is neither a string nor a list of strings");
        let refuse = |message: String| Err(Failure::of("stop", message));
        let strings = match &self.body.stop {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(stop)) => vec![stop.clone()],
            Some(Value::Array(stops)) => {
                let text = |stop: &Value| stop.as_str().map(str::to_owned);
                stops.iter().map(text).collect::<Option<_>>().ok_or_else(wrong)?
            }
            Some(_) => return Err(wrong()),
        };
        let strings: Vec<_> = strings.into_iter().filter(|stop| !stop.is_empty()).collect();
        if strings.len() > MOST_STOPS {
            let count = strings.len();
            return refuse(format!("`stop` has {count} strings; it may have {MOST_STOPS}"));
        }
        if let Some(long) = strings.iter().find(|stop| stop.len() > LONGEST_STOP) {
            let bytes = long.len();
            return refuse(format!(
                "`stop` has a string of {bytes} bytes; one may have {LONGEST_STOP}"
            ));
        }
        Ok(Stops::new(strings, keep))
    }

    /// Returns the plan for a prompt of a length.
    pub(super) fn plan(&self, served: &Served, prompt: usize) -> Result<Plan, Failure> {
        let (body, config) = (&self.body, &served.config);
        let count = body.stop_token_ids.as_ref().map_or(0, Vec::len);
        if count > MOST_STOP_IDS {
            let message = format!("`stop_token_ids` has {count} ids; it may have {MOST_STOP_IDS}");
            return Err(Failure::of("stop_token_ids", message));
        }
        let mut stop_ids = match body.ignore_eos {
            Some(true) => Vec::new(),
            _ => config.eos_token_ids.clone(),
        };
        for id in body.stop_token_ids.iter().flatten() {
            if !(0..config.vocab_size).contains(id) {
                let size = config.vocab_size;
                let message =
                    format!("`stop_token_ids` has {id}, outside the vocabulary of {size}");
                return Err(Failure::of("stop_token_ids", message));
            }
            stop_ids.extend(i32::try_from(*id));
        }
        if let Some(id) = self.chosen.iter().find(|id| !(0..config.vocab_size).contains(id)) {
            return Err(outside(*id, config));
        }
        Ok(Plan {
            sampling: self.sampling(config, served.seed())?,
            max_new: longest(body.max_new_tokens, prompt, served)?,
            stop_ids,
            top: self.top.unwrap_or(0) as usize,
            chosen: self.chosen.clone(),
        })
    }

    fn sampling(&self, config: &Config, seed: u64) -> Result<SamplingParams, Failure> {
        let body = &self.body;
        let Defaults { temperature, top_p, top_k, min_p } = Defaults::of(config);
        let temperature = body.temperature.unwrap_or(temperature);
        let top_p = body.top_p.unwrap_or(top_p);
        let min_p = body.min_p.unwrap_or(min_p);
        if !(0.0..=MOST_TEMPERATURE).contains(&temperature) {
            let message =
                format!("`temperature` is {temperature:?}; it may be 0 to {MOST_TEMPERATURE}");
            return Err(Failure::of("temperature", message));
        }
        // Next to nothing is 0 in the sampler.
        if !(top_p as f32 > 0.0 && top_p <= 1.0) {
            let message = format!("`top_p` is {top_p:?}; it may be above 0, to 1");
            return Err(Failure::of("top_p", message));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(Failure::of("min_p", format!("`min_p` is {min_p}; it may be 0 to 1")));
        }
        let top_k = match body.top_k.unwrap_or(top_k) {
            -1 => 0,
            top_k @ 1.. => top_k as usize,
            top_k => {
                let message = format!("`top_k` is {top_k}; it may be -1, or 1 or more");
                return Err(Failure::of("top_k", message));
            }
        };
        Ok(SamplingParams {
            temperature: temperature as f32,
            top_k,
            top_p: top_p as f32,
            min_p: min_p as f32,
            seed: body.sampling_seed.map_or(seed, |seed| seed as u64),
        })
    }
}

/// What holds if a request says nothing: the model's own generation settings.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(super) struct Defaults {
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) top_k: i64,
    pub(super) min_p: f64,
}

impl Defaults {
    pub(super) fn of(config: &Config) -> Self {
        let generation = &config.generation;
        Self {
            temperature: generation.temperature.map_or(1.0, decimal),
            top_p: generation.top_p.map_or(1.0, decimal),
            top_k: generation.top_k.filter(|top_k| *top_k != 0).unwrap_or(-1),
            min_p: generation.min_p.map_or(0.0, decimal),
        }
    }
}

/// Returns how long an answer may become; all that is left, if nothing is said.
fn longest(wanted: Option<i64>, prompt: usize, served: &Served) -> Result<usize, Failure> {
    let context = served.config.max_position_embeddings;
    let prompt = prompt as i64;
    let scored_only = wanted == Some(0);
    if prompt > context || (prompt == context && !scored_only) {
        return Err(Failure::bad(format!(
            "the input has {prompt} tokens; the model's context holds {context}, one of them for the answer"
        )));
    }
    match wanted {
        // What only scores keeps no keys and values.
        Some(0) => Ok(0),
        Some(wanted) if wanted < 0 => {
            Err(Failure::bad(format!("the longest answer is {wanted} tokens; it may be 0 or more")))
        }
        // The sum may be more than an i64 holds.
        Some(wanted) if wanted > context - prompt => Err(Failure::bad(format!(
            "{prompt} tokens of input and {wanted} of answer make {}; the model's context holds {context}",
            i128::from(prompt) + i128::from(wanted)
        ))),
        _ => remembered(wanted, prompt, served),
    }
}

/// Holds an answer that the context has room for against the memory for keys and values.
fn remembered(wanted: Option<i64>, prompt: i64, served: &Served) -> Result<usize, Failure> {
    let (context, memory) = (served.config.max_position_embeddings, served.kv_memory);
    let held = Cache::tokens_in(&served.config, memory);
    let held = i64::try_from(held).unwrap_or(i64::MAX).min(context);
    let least = wanted.unwrap_or(1);
    if prompt + least > held {
        return Err(Failure::bad(format!(
            "{prompt} tokens of input and {least} of answer make {}; the memory for keys and \
             values ({memory} bytes, `--kv-memory`) holds {held}",
            prompt + least
        )));
    }
    Ok(wanted.unwrap_or(held - prompt) as usize)
}

/// Refuses a name that is too long.
pub(super) fn check_name(member: &'static str, name: Option<&str>) -> Result<(), Failure> {
    let bytes = name.map_or(0, str::len);
    if bytes > LONGEST_NAME {
        let message = format!("`{member}` has {bytes} bytes; it may have {LONGEST_NAME}");
        return Err(Failure::of(member, message));
    }
    Ok(())
}

/// Refuses more prompts than one request may have, and more answers to them.
pub(super) fn check_prompts(prompts: usize, answers: usize) -> Result<(), Failure> {
    if prompts > MOST_PROMPTS {
        let message = format!("the request has {prompts} prompts; it may have {MOST_PROMPTS}");
        return Err(Failure::bad(message));
    }
    let all = prompts * answers;
    if all > MOST_PROMPTS {
        let message = format!(
            "{prompts} prompts of {answers} answers each make {all}; a request may have \
             {MOST_PROMPTS}"
        );
        return Err(Failure::of("n", message));
    }
    Ok(())
}

/// Refuses more log-probs of `token_ids_logprob` than fit into one answer.
pub(super) fn check_chosen(ids: usize, positions: usize) -> Result<(), Failure> {
    let all = ids.saturating_mul(positions);
    if all > MOST_CHOSEN {
        let message = format!(
            "`token_ids_logprob` has {ids} ids for {positions} positions, which makes {all} \
             log-probs; a request may ask for {MOST_CHOSEN}"
        );
        return Err(Failure::of("token_ids_logprob", message));
    }
    Ok(())
}

/// Checks the ids of a prompt.
pub(super) fn checked(ids: Vec<i64>, config: &Config) -> Result<Vec<i64>, Failure> {
    if ids.is_empty() {
        return Err(Failure::bad("the input has no tokens"));
    }
    match ids.iter().find(|id| !(0..config.vocab_size).contains(id)) {
        Some(id) => Err(outside(*id, config)),
        None => Ok(ids),
    }
}

fn outside(id: i64, config: &Config) -> Failure {
    Failure::bad(format!("id {id} is outside the vocabulary of {}", config.vocab_size))
}

/// Checks a number of alternatives, wanted or not.
fn bounded_top(name: &'static str, top: Option<i64>) -> Result<Option<i64>, Failure> {
    match top {
        None | Some(0..=MOST_TOP) => Ok(top),
        Some(top) => {
            Err(Failure::of(name, format!("`{name}` is {top}; it may be 0 to {MOST_TOP}")))
        }
    }
}
