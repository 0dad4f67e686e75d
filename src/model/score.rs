//! Log-probs of tokens that are already there, for many sequences at once.

use tch::{Kind, Tensor};

use super::decoder::Decoder;

/// Tokens that run through the layers together.
const TOKEN_BUDGET: usize = 4096;
/// Rows whose logits exist at the same time.
const HEAD_ROWS: i64 = 512;

/// What to score: one sequence.
#[derive(Debug, Clone, Default)]
pub struct Score {
    /// The whole sequence.
    pub ids: Vec<i64>,
    /// First position to score, at least 1: what comes first has no log-prob.
    pub start: usize,
    /// Divides the logits; 0 counts as 1.
    pub temperature: f32,
    /// How many of the likeliest tokens to return per position; 0 for none.
    pub top_k: usize,
    /// Tokens to score at each position besides the sequence's own: row-major
    /// `[R, c]`, R scored positions, the same number c at each. Empty for none.
    pub chosen: Vec<i64>,
    /// Whether to return the entropy at each position.
    pub entropy: bool,
}

/// What a [`Score`] found. R is `ids.len() - start`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scored {
    /// `[R]`, natural logarithms.
    pub log_probs: Vec<f32>,
    /// Row-major `[R, top_k]`, likeliest first.
    pub top_ids: Vec<i64>,
    /// Row-major `[R, top_k]`.
    pub top_log_probs: Vec<f32>,
    /// Row-major `[R, c]`, in the order of `chosen`.
    pub chosen_log_probs: Vec<f32>,
    /// `[R]`, in nats; empty if not asked for.
    pub entropy: Vec<f32>,
}

pub(super) fn score(decoder: &Decoder, requests: &[Score]) -> Vec<Scored> {
    let mut results = Vec::with_capacity(requests.len());
    let mut rest = requests;
    while !rest.is_empty() {
        let mut tokens = 0;
        // At least one, however long it is.
        let fits = rest.iter().take_while(|request| {
            let first = tokens == 0;
            tokens += request.ids.len();
            first || tokens <= TOKEN_BUDGET
        });
        let (batch, later) = rest.split_at(fits.count().max(1));
        results.extend(score_batch(decoder, batch));
        rest = later;
    }
    results
}

fn score_batch(decoder: &Decoder, requests: &[Score]) -> Vec<Scored> {
    let ids: Vec<i64> = requests.iter().flat_map(|request| request.ids.iter().copied()).collect();
    let lengths: Vec<i64> = requests.iter().map(|request| request.ids.len() as i64).collect();
    if ids.is_empty() {
        return vec![Scored::default(); requests.len()];
    }
    let hidden = decoder.hidden(&Tensor::from_slice(&ids), &lengths);
    let mut offset = 0;
    let scored = requests.iter().zip(&lengths).map(|(request, &length)| {
        let first = request.start.max(1) as i64;
        let mut scored = Scored::default();
        // The row before a token predicts it.
        let mut position = first;
        while position < length {
            let rows = HEAD_ROWS.min(length - position);
            let hidden = hidden.narrow(0, offset + position - 1, rows);
            let done = (position - first) as usize;
            score_rows(&decoder.head(&hidden), request, done, &mut scored);
            position += rows;
        }
        offset += length;
        scored
    });
    scored.collect()
}

/// Scores the rows of one chunk of logits; `done` rows came before it.
fn score_rows(logits: &Tensor, request: &Score, done: usize, scored: &mut Scored) {
    let rows = logits.size()[0];
    let device = logits.device();
    let logits = match request.temperature {
        0.0 | 1.0 => logits.shallow_clone(),
        temperature => logits / f64::from(temperature),
    };
    let log_sum = logits.logsumexp([-1_i64].as_slice(), true);
    let log_probs_at = |ids: &Tensor| logits.gather(1, ids, false) - &log_sum;

    let first = request.start.max(1) + done;
    let own = &request.ids[first..first + rows as usize];
    let own = Tensor::from_slice(own).view([rows, 1]).to_device(device);
    extend_f32(&mut scored.log_probs, &log_probs_at(&own));
    if request.top_k > 0 {
        let (values, ids) = logits.topk(request.top_k as i64, -1, true, true);
        extend_f32(&mut scored.top_log_probs, &(values - &log_sum));
        extend_i64(&mut scored.top_ids, &ids);
    }
    let scored_positions = request.ids.len() - request.start.max(1);
    let width = request.chosen.len() / scored_positions;
    if width > 0 {
        let chosen = &request.chosen[done * width..(done + rows as usize) * width];
        let chosen = Tensor::from_slice(chosen).view([rows, width as i64]).to_device(device);
        extend_f32(&mut scored.chosen_log_probs, &log_probs_at(&chosen));
    }
    if request.entropy {
        let log_probs = &logits - &log_sum;
        let terms = log_probs.exp() * log_probs;
        let entropy = -terms.sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float);
        extend_f32(&mut scored.entropy, &entropy);
    }
}

fn extend_f32(out: &mut Vec<f32>, tensor: &Tensor) {
    let (start, count) = (out.len(), tensor.numel());
    out.resize(start + count, 0.0);
    tensor.contiguous().copy_data(&mut out[start..], count);
}

fn extend_i64(out: &mut Vec<i64>, tensor: &Tensor) {
    let (start, count) = (out.len(), tensor.numel());
    out.resize(start + count, 0);
    tensor.contiguous().copy_data(&mut out[start..], count);
}
