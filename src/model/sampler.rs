//! Choosing the next token from logits. No tensors: one row of f32 in, one
//! token out, and the same seed gives the same tokens.

mod shares;

use super::Error;

use shares::{LogSum, Shares};

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the likeliest tokens until their probability reaches this share.
    pub top_p: f32,
    /// Keep tokens with at least this share of the likeliest one's probability.
    pub min_p: f32,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    /// The token.
    pub id: i32,
    /// Its log-prob under the logits divided by the temperature, before
    /// anything was cut. Temperature 0 counts as 1.
    pub log_prob: f32,
    /// Its log-prob under the logits themselves.
    pub raw_log_prob: f32,
}

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    /// How many random numbers have been drawn.
    drawn: u64,
    /// Room for what each token is worth.
    shares: Shares,
}

impl Sampler {
    /// Refuses settings that mean nothing.
    pub fn new(params: SamplingParams) -> Result<Self, Error> {
        let refuse = |name, found: f32, wanted| {
            Err(Error::Sampling { name, found: f64::from(found), wanted })
        };
        let SamplingParams { temperature, top_p, min_p, .. } = params;
        if !temperature.is_finite() || temperature < 0.0 {
            return refuse("temperature", temperature, "0 or more");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top_p", top_p, "above 0, at most 1");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return refuse("min_p", min_p, "between 0 and 1");
        }
        Ok(Self { params, drawn: 0, shares: Shares::default() })
    }

    /// Chooses a token. Logits that are not finite are an error, never a token.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, Error> {
        let likeliest = argmax(logits)?;
        let largest = logits[likeliest];
        let temperature = self.params.temperature;
        if temperature == 0.0 {
            let log_prob = LogSum::of(logits, 1.0, largest).log_prob(largest);
            return Ok(Sampled { id: likeliest as i32, log_prob, raw_log_prob: log_prob });
        }
        let tempered = self.shares.set(logits, temperature, largest);
        let raw = match temperature {
            1.0 => tempered,
            _ => LogSum::of(logits, 1.0, largest),
        };
        let draw = self.uniform();
        let id = self.choose(draw);
        let log_prob = tempered.log_prob(logits[id]);
        Ok(Sampled { id: id as i32, log_prob, raw_log_prob: raw.log_prob(logits[id]) })
    }

    /// The filters are those of SGLang: each looks at the whole distribution
    /// (top-p does not renormalise what top-k left), then what all keep is drawn
    /// from.
    fn choose(&self, draw: f64) -> usize {
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        if top_k == 0 && top_p == 1.0 && min_p == 0.0 {
            return self.shares.at(draw);
        }
        let (count, total) = (self.shares.all().len(), self.shares.total());
        // A token this unlikely cannot be inside the top-p share: all of them
        // together do not make up the rest. Nor can one below min-p, and the likeliest
        // one is worth 1. Spares sorting the vocabulary.
        let least = ((1.0 - f64::from(top_p)) / count as f64).max(f64::from(min_p) / total);
        let probs = self.shares.all().iter().map(|share| f64::from(*share) / total);
        let mut kept: Vec<(usize, f64)> =
            probs.enumerate().filter(|&(_, prob)| prob >= least).collect();
        let likelier_first =
            |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if top_k > 0 && top_k < kept.len() {
            kept.select_nth_unstable_by(top_k - 1, likelier_first);
            kept.truncate(top_k);
        }
        kept.sort_unstable_by(likelier_first);
        let mut before = 0.0;
        let mut inside = 0;
        let least_of_best = kept.first().map_or(0.0, |&(_, best)| best * f64::from(min_p));
        for &(_, prob) in &kept {
            if before >= f64::from(top_p) || prob < least_of_best {
                break;
            }
            before += prob;
            inside += 1;
        }
        kept.truncate(inside.max(1));
        let total: f64 = kept.iter().map(|&(_, prob)| prob).sum();
        walk(kept.into_iter(), draw * total)
    }

    /// Returns the next random number in `[0, 1)`: a mix (splitmix64) of the
    /// seed and how many came before, so it depends on nothing else.
    fn uniform(&mut self) -> f64 {
        self.drawn += 1;
        let start = mix(self.params.seed.wrapping_add(GOLDEN));
        let mixed = mix(start.wrapping_add(self.drawn.wrapping_mul(GOLDEN)));
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// 2^64 over the golden ratio.
pub(super) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A step of SplitMix64 (Steele et al. 2014).
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the likeliest tokens with their log-probs at a temperature (0 counts
/// as 1), likeliest first, equal ones by id.
pub fn top_log_probs(
    logits: &[f32],
    count: usize,
    temperature: f32,
) -> Result<Vec<(i32, f32)>, Error> {
    let likeliest = argmax(logits)?;
    let temperature = if temperature == 0.0 { 1.0 } else { temperature };
    let log_sum = LogSum::of(logits, temperature, logits[likeliest]);
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let count = count.min(ids.len());
    if count > 0 && count < ids.len() {
        ids.select_nth_unstable_by(count - 1, order);
    }
    ids.truncate(count);
    ids.sort_unstable_by(order);
    Ok(ids.into_iter().map(|id| (id as i32, log_sum.log_prob(logits[id]))).collect())
}

/// Returns the first of the largest logits, and refuses what is not finite.
fn argmax(logits: &[f32]) -> Result<usize, Error> {
    let most = shares::largest(logits);
    match logits.iter().position(|logit| *logit == most) {
        Some(best) if shares::all_finite(logits) => Ok(best),
        _ => {
            let odd = logits.iter().copied().enumerate().find(|(_, logit)| !logit.is_finite());
            let (id, logit) = odd.unwrap_or((0, f32::NAN));
            Err(Error::NotFinite { id, logit })
        }
    }
}

/// Draws from unnormalised probabilities: the token in whose stretch the mark
/// falls. Rounding may leave the mark beyond the end; then the last one with any
/// probability.
fn walk(probs: impl Iterator<Item = (usize, f64)>, mark: f64) -> usize {
    let mut sum = 0.0;
    let mut last = 0;
    for (id, prob) in probs {
        if prob > 0.0 {
            last = id;
        }
        sum += prob;
        if mark < sum {
            return id;
        }
    }
    last
}
