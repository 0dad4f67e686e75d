//! May a new policy take the place of the present one? Paired scores on a
//! frozen suite, and a rule.
//!
//! Both policies answer the same items; the rule looks at the differences. Items
//! of one session are alike, so whole sessions are drawn for the interval: single
//! items would make it too narrow.

use super::Session;
use crate::trajectory::Turn;

/// Sessions below which an interval means nothing.
pub const LEAST_SESSIONS: usize = 5;
/// What the log-probs of the same weights may differ by: which sequences are computed
/// together changes sums in their last bits.
pub const ROUNDING: f64 = 2e-5;
/// How sure the interval is.
pub const CONFIDENCE: f64 = 0.95;

/// The scores of one item under both policies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// Under the candidate.
    pub candidate: f64,
    /// Under the present policy.
    pub current: f64,
}

impl Pair {
    /// Returns candidate minus present; what is rounding is 0.
    fn difference(&self) -> f64 {
        let difference = self.candidate - self.current;
        if difference.abs() <= ROUNDING { 0.0 } else { difference }
    }
}

/// When a candidate passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// The largest loss that may stay unseen.
    pub margin: f64,
    /// Items below which nothing is decided.
    pub least_items: usize,
    /// Times that the suite is drawn anew.
    pub resamples: usize,
    /// Seed of the draws.
    pub seed: u64,
}

/// What the gate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The candidate is no worse, as far as the margin goes.
    Promote,
    /// The candidate is worse.
    Reject,
    /// The suite is too small, or too noisy, to tell.
    Undecided,
}

impl Verdict {
    /// Returns its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Promote => "promote",
            Self::Reject => "reject",
            Self::Undecided => "undecided",
        }
    }
}

/// The comparison in numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Items.
    pub items: usize,
    /// Sessions that they are of.
    pub sessions: usize,
    /// Mean score of the candidate.
    pub candidate: f64,
    /// Mean score of the present policy.
    pub current: f64,
    /// Mean of candidate minus present.
    pub difference: f64,
    /// The interval of that mean.
    pub interval: (f64, f64),
    /// What follows.
    pub verdict: Verdict,
}

/// Compares two policies by their scores, session by session. Worse is worse: an
/// interval that lies wholly below 0 rejects, however small the loss. No worse is
/// an interval that lies wholly above minus the margin. Whatever is neither, or
/// too few items or sessions, is undecided. Returns nothing if there is no item.
pub fn compare(sessions: &[Vec<Pair>], rule: &Rule) -> Option<Figures> {
    let sessions: Vec<&[Pair]> =
        sessions.iter().filter(|pairs| !pairs.is_empty()).map(Vec::as_slice).collect();
    let items: usize = sessions.iter().map(|pairs| pairs.len()).sum();
    if items == 0 {
        return None;
    }
    let mean = |score: fn(&Pair) -> f64| {
        sessions.iter().copied().flatten().map(score).sum::<f64>() / items as f64
    };
    let interval = interval(&sessions, rule);
    let small = items < rule.least_items || sessions.len() < LEAST_SESSIONS;
    let verdict = match interval {
        _ if small => Verdict::Undecided,
        (_, upper) if upper < 0.0 => Verdict::Reject,
        (lower, _) if lower >= -rule.margin => Verdict::Promote,
        _ => Verdict::Undecided,
    };
    Some(Figures {
        items,
        sessions: sessions.len(),
        candidate: mean(|pair| pair.candidate),
        current: mean(|pair| pair.current),
        difference: mean(Pair::difference),
        interval,
        verdict,
    })
}

/// Returns the percentiles of the mean difference over draws of the sessions
/// with replacement.
fn interval(sessions: &[&[Pair]], rule: &Rule) -> (f64, f64) {
    let sums: Vec<(f64, f64)> = sessions
        .iter()
        .map(|pairs| (pairs.iter().map(Pair::difference).sum(), pairs.len() as f64))
        .collect();
    let mut random = Random(rule.seed);
    let mut means: Vec<f64> = (0..rule.resamples.max(1))
        .map(|_| {
            let (mut sum, mut count) = (0.0, 0.0);
            for _ in 0..sums.len() {
                let drawn = sums[random.below(sums.len())];
                sum += drawn.0;
                count += drawn.1;
            }
            sum / count
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let at = |share: f64| means[((means.len() - 1) as f64 * share).round() as usize];
    let outside = (1.0 - CONFIDENCE) / 2.0;
    (at(outside), at(1.0 - outside))
}

/// SplitMix64: small, seeded, the same everywhere.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below a limit. The limit is so far below 2^64 that the
    /// unevenness of the product does not show.
    fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }
}

/// Returns whether an answer was praised: by number, else by a judge.
pub fn is_praised(turn: &Turn) -> bool {
    turn.reward_explicit.or(turn.score).is_some_and(|worth| worth > 0.0)
}

/// Puts the scores of two runs over the same sessions together. Items that
/// either has no score of are left out.
pub fn pairs(candidate: &[Vec<Option<f64>>], current: &[Vec<Option<f64>>]) -> Vec<Vec<Pair>> {
    let session = |(candidate, current): (&Vec<Option<f64>>, &Vec<Option<f64>>)| {
        let both = candidate.iter().zip(current);
        both.filter_map(|(candidate, current)| {
            Some(Pair { candidate: (*candidate)?, current: (*current)? })
        })
        .collect()
    };
    candidate.iter().zip(current).map(session).collect()
}

/// Returns how many items a suite has.
pub fn items(sessions: &[Session]) -> usize {
    sessions.iter().map(|session| session.turns.len()).sum()
}
