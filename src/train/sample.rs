//! From a row to a sample, or to the reason why it is not trained.

use std::collections::BTreeMap;

use crate::advantage::{self, Estimator, Method};
use crate::loss::{HintSelection, SubsetIds};
use crate::trajectory::Turn;
use crate::trajectory::lint::{
    LARGEST_ADVANTAGE, SMALLEST_TEMPERATURE, bad_advantage, bad_temperature,
};
use crate::trajectory::words::{LogProbKind, SampleKind};

use super::distil::{self, Distillation, Topk};

/// One answer that may be trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The row's id.
    pub turn_id: String,
    /// Token ids of the prompt; never empty.
    pub prompt_ids: Vec<i32>,
    /// Token ids of the answer; every list below has one entry per id.
    pub response_ids: Vec<i32>,
    /// Which of them are trained.
    pub mask: Vec<bool>,
    /// The server's log-probs, where it gave one.
    pub rollout: Vec<Option<f32>>,
    /// Temperature of the server's log-probs, at which ratios are taken.
    pub temperature: f64,
    /// The resolved reward.
    pub reward: Option<f32>,
    /// What `advantage` made of it, per response token.
    pub reward_part: Option<Vec<f32>>,
    /// The teacher's log-probs.
    pub teacher: Option<Vec<f32>>,
    /// The top-k columns, if the estimator reads them.
    pub topk: Option<Topk>,
    /// Temperature of the teacher's log-probs.
    pub teacher_temperature: f64,
    /// Whether the at-least-one rule kept the row.
    pub promoted: bool,
    /// Policy steps between the one that sampled it and the one trained.
    pub staleness: u64,
}

/// Whose log-probs stand for the old policy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OldLogProbs {
    /// A forward pass of the trainer before the step.
    Recompute,
    /// The server's.
    Rollout,
}

/// Which rows are trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Admission {
    /// The estimator: a row must carry a signal that it uses.
    pub method: Method,
    /// Which hints teach which ids, under `hybrid`; see [`Admission::distillation`].
    pub distillation: Distillation,
    /// Whose log-probs stand for the old policy's.
    pub old_log_probs: OldLogProbs,
    /// Oldest policy, in steps, whose rows are trained.
    pub max_staleness: u64,
    /// Steps of weight versions that are no numbers. The name `none` stands for
    /// a row without a version.
    pub version_aliases: BTreeMap<String, u64>,
    /// Temperature of rows that do not say theirs.
    pub assume_temperature: Option<f64>,
    /// Number of ids the model knows.
    pub vocabulary: i64,
}

impl Admission {
    /// Returns which hints teach which ids: under `topk-kl` the first those of its own.
    pub(super) fn distillation(&self) -> Distillation {
        match self.method.estimator {
            Estimator::TopkKl => {
                let (selection, subset) = (HintSelection::Shortest, SubsetIds::Teacher);
                Distillation { selection, subset, ..Distillation::default() }
            }
            _ => self.distillation,
        }
    }
}

/// Why a row is not trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// One word for counting.
    pub reason: String,
    /// What exactly is wrong, for a row that is broken; `None` for a sound row
    /// that just is not for this step.
    pub fault: Option<String>,
}

impl Refusal {
    pub(super) fn sound(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), fault: None }
    }

    pub(super) fn broken(reason: &str, fault: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), fault: Some(fault.into()) }
    }
}

/// Makes a sample of a row that policy `step` is to learn from.
pub fn admit(turn: &Turn, step: u64, admission: &Admission) -> Result<Sample, Refusal> {
    if turn.turn_id.is_empty() {
        // The ledger could not tell it from others.
        return Err(Refusal::broken("no_turn_id", "turn_id is empty"));
    }
    if let Some(error) = &turn.advantage_error {
        return Err(Refusal::broken("advantage_error", error.clone()));
    }
    let mask = mask(turn)?;
    let signals = advantage::resolve(turn)
        .map_err(|refusal| Refusal::broken("contradictory", refusal.to_string()))?;
    let teacher = signals.teacher_log_probs(turn).map(<[f32]>::to_vec);
    let reward = reward(turn)?;
    let reward_part = reward_part(turn, mask.len())?;
    let promoted = turn.promoted == Some(true);
    let rewarded = reward.is_some_and(|reward| reward != 0.0)
        || reward_part.iter().flatten().any(|value| *value != 0.0);
    let topk = topk(turn, admission)?;
    let reads_topk = admission.method.estimator.reads_topk();
    let taught = if reads_topk { topk.is_some() } else { teacher.is_some() };
    if !mask.contains(&true) || !has_signal(&admission.method, rewarded, taught, promoted) {
        let hinted = teacher.is_some() && reads_topk;
        return Err(silence(turn, &mask, hinted));
    }
    let staleness = staleness(turn, step, admission)?;
    let temperature = temperature(turn, admission)?;
    let prompt_ids = turn.prompt_ids.clone().unwrap_or_default();
    let response_ids = turn.response_ids.clone().unwrap_or_default();
    check_vocabulary(&[&prompt_ids, &response_ids], admission.vocabulary)?;
    let rollout = turn.rollout_log_probs.clone().unwrap_or_else(|| vec![None; response_ids.len()]);
    let teacher_temperature = teacher_temperature(turn)?;
    let sample = Sample {
        turn_id: turn.turn_id.clone(),
        prompt_ids,
        response_ids,
        mask,
        rollout,
        temperature,
        reward,
        reward_part,
        teacher,
        topk,
        teacher_temperature,
        promoted,
        staleness,
    };
    match admission.old_log_probs {
        OldLogProbs::Recompute => Ok(sample),
        OldLogProbs::Rollout => with_rollout(sample),
    }
}

/// Reads the mask that `advantage` wrote. It does not stand alone: a row that must
/// not be trained is refused whatever it says.
fn mask(turn: &Turn) -> Result<Vec<bool>, Refusal> {
    let tokens = turn.response_ids.as_ref().map_or(0, Vec::len);
    let mask = turn.loss_mask.clone().unwrap_or_default();
    if let Some((token, flag)) = mask.iter().enumerate().find(|(_, flag)| ![0, 1].contains(*flag)) {
        let fault = format!("loss_mask is {flag} at token {token}, wanted 0 or 1");
        return Err(Refusal::broken("contradictory", fault));
    }
    if let Some(reason) = advantage::untrainable(turn) {
        return Err(match mask.contains(&1) {
            true => {
                let fault = format!("loss_mask is 1 in a row that must not be trained: {reason}");
                Refusal::broken(&reason, fault)
            }
            false => Refusal::sound(reason),
        });
    }
    if mask.len() != tokens {
        let fault = format!("loss_mask has {} values for {tokens} response ids", mask.len());
        return Err(Refusal::broken("contradictory", fault));
    }
    Ok(mask.iter().map(|flag| *flag == 1).collect())
}

/// Says why a row that can be trained has nothing to learn from.
fn silence(turn: &Turn, mask: &[bool], hinted: bool) -> Refusal {
    // A row of some kind may have a reason beside its signal.
    let without_kind = turn.sample_kind.is_none_or(|kind| kind == SampleKind::None);
    match turn.sample_reason.clone().filter(|_| without_kind) {
        Some(reason) => Refusal::sound(reason),
        None if !mask.contains(&true) => Refusal::sound("masked"),
        None if hinted => Refusal::sound("no_topk"),
        None => Refusal::sound("no_signal_for_estimator"),
    }
}

fn reward(turn: &Turn) -> Result<Option<f32>, Refusal> {
    match turn.reward {
        Some(reward) if !(-1.0..=1.0).contains(&reward) => {
            let fault = format!("reward is {reward:?}, wanted -1 to 1");
            Err(Refusal::broken("contradictory", fault))
        }
        reward => Ok(reward),
    }
}

/// Errors if one of the numbers, each with its token, is no advantage.
pub(super) fn check_advantages(
    column: &str,
    values: impl IntoIterator<Item = (usize, f32)>,
) -> Result<(), Refusal> {
    let fault = match values.into_iter().find(|(_, value)| bad_advantage(*value)) {
        None => return Ok(()),
        Some((token, value)) if value.is_finite() => {
            format!("{column} is {value:?} at token {token}, more than {LARGEST_ADVANTAGE} in size")
        }
        Some((token, _)) => format!("{column} is not finite at token {token}"),
    };
    Err(Refusal::broken("contradictory", fault))
}

/// Reads the reward part that `advantage` wrote.
fn reward_part(turn: &Turn, tokens: usize) -> Result<Option<Vec<f32>>, Refusal> {
    let Some(part) = &turn.rl_advantages else { return Ok(None) };
    if part.len() != tokens {
        let fault = format!("rl_advantages has {} values for {tokens} response ids", part.len());
        return Err(Refusal::broken("contradictory", fault));
    }
    check_advantages("rl_advantages", part.iter().copied().enumerate())?;
    Ok(Some(part.clone()))
}

/// Reads the top-k columns, if the estimator does.
fn topk(turn: &Turn, admission: &Admission) -> Result<Option<Topk>, Refusal> {
    let tokens = turn.response_ids.as_ref().map_or(0, Vec::len);
    match admission.method.estimator.reads_topk() {
        true => distil::read(turn, tokens, admission.vocabulary, admission.distillation().subset),
        false => Ok(None),
    }
}

fn has_signal(method: &Method, rewarded: bool, taught: bool, promoted: bool) -> bool {
    match method.estimator {
        Estimator::Opd | Estimator::TopkKl => taught,
        Estimator::Combine | Estimator::Hybrid => rewarded || taught,
        Estimator::Grpo
        | Estimator::Rloo
        | Estimator::ReinforcePlusPlus
        | Estimator::ReinforcePlusPlusBaseline
        | Estimator::Gae => rewarded || (promoted && taught),
    }
}

/// Returns how many steps old the row's policy is.
fn staleness(turn: &Turn, step: u64, admission: &Admission) -> Result<u64, Refusal> {
    let name = turn.weight_version.as_deref().unwrap_or("none");
    let version = match admission.version_aliases.get(name) {
        Some(version) => *version,
        None if turn.weight_version.is_none() => return Err(Refusal::sound("version_missing")),
        None => name.parse().map_err(|_| Refusal::sound("version_unknown"))?,
    };
    match step.checked_sub(version) {
        None => Err(Refusal::sound("version_from_the_future")),
        Some(staleness) if staleness > admission.max_staleness => Err(Refusal::sound("stale")),
        Some(staleness) => Ok(staleness),
    }
}

/// Returns the temperature of the server's log-probs. Greedy sampling (0) has
/// log-probs of the plain distribution.
fn temperature(turn: &Turn, admission: &Admission) -> Result<f64, Refusal> {
    let known = match turn.sampling.log_prob_kind {
        LogProbKind::Raw => Some(1.0),
        LogProbKind::Tempered => turn.sampling.temperature.map(f64::from),
        LogProbKind::Unknown => None,
    };
    match known.or(admission.assume_temperature) {
        None => Err(Refusal::sound("temperature_unknown")),
        Some(0.0) => Ok(1.0),
        Some(temperature) => sound_temperature("temperature", temperature),
    }
}

/// Returns the temperature of the teacher's log-probs.
fn teacher_temperature(turn: &Turn) -> Result<f64, Refusal> {
    let temperature = f64::from(turn.teacher_temperature.unwrap_or(1.0));
    sound_temperature("teacher_temperature", temperature)
}

fn sound_temperature(column: &str, temperature: f64) -> Result<f64, Refusal> {
    match bad_temperature(temperature as f32) {
        false => Ok(temperature),
        true => {
            let wanted = format!("wanted a number, {SMALLEST_TEMPERATURE} or more");
            let fault = format!("{column} is {:?}, {wanted}", temperature as f32);
            Err(Refusal::broken("contradictory", fault))
        }
    }
}

pub(super) fn check_vocabulary(lists: &[&[i32]], vocabulary: i64) -> Result<(), Refusal> {
    let known = |id: &&i32| (0..vocabulary).contains(&i64::from(**id));
    match lists.iter().flat_map(|ids| ids.iter()).find(|id| !known(id)) {
        None => Ok(()),
        Some(id) => Err(Refusal::broken(
            "foreign_token_id",
            format!("token id {id} is not among the model's {vocabulary}: another tokenizer"),
        )),
    }
}

/// Takes out the tokens for which the server gave no log-prob; they have no
/// ratio.
fn with_rollout(mut sample: Sample) -> Result<Sample, Refusal> {
    for (flag, log_prob) in sample.mask.iter_mut().zip(&sample.rollout) {
        *flag &= log_prob.is_some();
    }
    if !sample.mask.contains(&true) {
        return Err(Refusal::sound("no_log_probs"));
    }
    if sample.teacher.is_some() && sample.teacher_temperature != sample.temperature {
        return Err(Refusal::sound("teacher_temperature_differs"));
    }
    Ok(sample)
}

impl Sample {
    /// Returns the places of the trained tokens in the answer.
    pub fn trained(&self) -> impl Iterator<Item = usize> + '_ {
        let places = self.mask.iter().enumerate();
        places.filter(|(_, flag)| **flag).map(|(token, _)| token)
    }

    /// Returns how many ids go into the model: all but the last.
    pub(super) fn input_length(&self) -> usize {
        (self.prompt_ids.len() + self.response_ids.len()).saturating_sub(1)
    }
}
