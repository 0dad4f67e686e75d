//! Choosing the next token from logits. No tensors: one row of f32 in, one
//! token out, and the same seed gives the same tokens.

use super::Error;

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
        Ok(Self { params, drawn: 0 })
    }

    /// Chooses a token. Logits that are not finite are an error, never a token.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, Error> {
        let likeliest = argmax(logits)?;
        let raw = LogSum::of(logits, 1.0, logits[likeliest]);
        if self.params.temperature == 0.0 {
            let log_prob = raw.log_prob(logits[likeliest]);
            return Ok(Sampled { id: likeliest as i32, log_prob, raw_log_prob: log_prob });
        }
        let tempered = match self.params.temperature {
            1.0 => raw,
            temperature => LogSum::of(logits, temperature, logits[likeliest]),
        };
        let draw = self.uniform();
        let id = self.choose(logits, &tempered, draw);
        let log_prob = tempered.log_prob(logits[id]);
        Ok(Sampled { id: id as i32, log_prob, raw_log_prob: raw.log_prob(logits[id]) })
    }

    /// The filters are those of SGLang: each looks at the whole distribution
    /// (top-p does not renormalise what top-k left), then what all keep is drawn
    /// from.
    fn choose(&self, logits: &[f32], tempered: &LogSum, draw: f64) -> usize {
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        if top_k == 0 && top_p == 1.0 && min_p == 0.0 {
            return walk((0..logits.len()).map(|id| (id, tempered.prob(logits[id]))), draw);
        }
        // A token this unlikely cannot be inside the top-p share: all of them
        // together do not make up the rest. Spares sorting the vocabulary.
        let least = (1.0 - f64::from(top_p)) / logits.len() as f64;
        let mut kept: Vec<(usize, f64)> = (0..logits.len())
            .map(|id| (id, tempered.prob(logits[id])))
            .filter(|&(_, prob)| prob >= least)
            .collect();
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
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return Err(Error::NotFinite { id, logit });
        }
        if logit > logits[best] {
            best = id;
        }
    }
    match logits.is_empty() {
        true => Err(Error::NotFinite { id: 0, logit: f32::NAN }),
        false => Ok(best),
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

/// Softmax of logits divided by a temperature: what log-probs need of it.
#[derive(Clone, Copy)]
struct LogSum {
    temperature: f64,
    /// Logarithm of the sum of exponentials.
    value: f64,
}

impl LogSum {
    fn of(logits: &[f32], temperature: f32, largest: f32) -> Self {
        let temperature = f64::from(temperature);
        let largest = f64::from(largest);
        let sum: f64 =
            logits.iter().map(|&logit| ((f64::from(logit) - largest) / temperature).exp()).sum();
        Self { temperature, value: largest / temperature + sum.ln() }
    }

    fn log_prob(&self, logit: f32) -> f32 {
        (f64::from(logit) / self.temperature - self.value) as f32
    }

    fn prob(&self, logit: f32) -> f64 {
        (f64::from(logit) / self.temperature - self.value).exp()
    }
}
