//! Log-probs of tokens that are already there, for many sequences at once.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::decoder::Decoder;
use super::prefix;
use super::prefix::Leaf;

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
    let sequences: Vec<_> =
        requests.iter().map(|request| (request.ids.as_slice(), request.start)).collect();
    let mut results = vec![Scored::default(); requests.len()];
    each_states(decoder, &sequences, |place, states| {
        results[place] = read(decoder, &states, &requests[place]);
    });
    results
}

/// Calls `take` with the place of each sequence and the final states that predict
/// its tokens from a position on, `[R, H]`. A beginning that sequences share is
/// computed once; no more than one layout is held. Returns how many tokens were
/// computed.
pub(super) fn each_states(
    decoder: &Decoder,
    sequences: &[(&[i64], usize)],
    mut take: impl FnMut(usize, Tensor),
) -> usize {
    let ids: Vec<_> = sequences.iter().map(|(ids, _)| *ids).collect();
    let mut computed = 0;
    for forest in prefix::forests(&ids) {
        if forest.ids.is_empty() {
            continue;
        }
        computed += forest.ids.len();
        let hidden = decoder.shared(&forest);
        for Leaf { place, path } in &forest.leaves {
            let (ids, start) = sequences[*place];
            take(*place, states(&hidden, path, (ids.len(), start)));
        }
    }
    computed
}

/// Returns the states that predict the tokens of a sequence, of such a length, from a
/// position on.
pub(super) fn states(
    hidden: &Tensor,
    path: &[Range<i64>],
    (length, start): (usize, usize),
) -> Tensor {
    // The row before a token predicts it.
    let scored = start.max(1) as i64 - 1..(length as i64 - 1).max(0);
    let runs = prefix::part(path, scored);
    let run = |rows: &Range<i64>| hidden.narrow(0, rows.start, rows.end - rows.start);
    match &runs[..] {
        [] => hidden.narrow(0, 0, 0),
        [rows] => run(rows),
        several => Tensor::cat(&several.iter().map(run).collect::<Vec<_>>(), 0),
    }
}

/// Scores a sequence of which the states are there.
pub(super) fn read(decoder: &Decoder, states: &Tensor, request: &Score) -> Scored {
    let mut scored = Scored::default();
    let mut done = 0;
    while done < states.size()[0] {
        done += read_rows(decoder, (states, done), request, &mut scored);
    }
    scored
}

/// Scores the next rows of a sequence, of which some are done; returns how many.
pub(super) fn read_rows(
    decoder: &Decoder,
    (states, done): (&Tensor, i64),
    request: &Score,
    scored: &mut Scored,
) -> i64 {
    let rows = HEAD_ROWS.min(states.size()[0] - done);
    let logits = decoder.head(&states.narrow(0, done, rows));
    score_rows(logits, request, done as usize, scored);
    rows
}

/// Scores the rows of one chunk of logits; `done` rows came before it.
fn score_rows(mut logits: Tensor, request: &Score, done: usize, scored: &mut Scored) {
    let rows = logits.size()[0];
    let device = logits.device();
    if !matches!(request.temperature, 0.0 | 1.0) {
        let _ = logits.g_div_scalar_(f64::from(request.temperature));
    }
    // One kernel over the vocabulary; `logsumexp` would be three.
    let log_probs = logits.log_softmax(-1, Kind::Float);
    let at = |ids: &[i64]| {
        let ids = Tensor::from_slice(ids).view([rows, -1]).to_device(device);
        log_probs.gather(1, &ids, false)
    };
    let first = request.start.max(1) + done;
    extend_f32(&mut scored.log_probs, &at(&request.ids[first..first + rows as usize]));
    if request.top_k > 0 {
        let (values, ids) = log_probs.topk(request.top_k as i64, -1, true, true);
        extend_f32(&mut scored.top_log_probs, &values);
        extend_i64(&mut scored.top_ids, &ids);
    }
    let scored_positions = request.ids.len() - request.start.max(1);
    let width = request.chosen.len() / scored_positions;
    if width > 0 {
        let chosen = &request.chosen[done * width..(done + rows as usize) * width];
        extend_f32(&mut scored.chosen_log_probs, &at(chosen));
    }
    if request.entropy {
        let terms = log_probs.exp() * &log_probs;
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
