//! The part of `hybrid` and `topk-kl` that `train` has the numbers for: from the
//! top-k columns of a row to what each id of each token's subset is worth.

use tch::{Kind, Tensor};

use crate::advantage::Method;
use crate::loss::{
    Candidates, DistillWeights, HintSelection, Subset, SubsetIds, TopkError, select_subset,
    topk_advantages,
};
use crate::trajectory::Turn;
use crate::trajectory::lint::bad_log_prob;

use super::objective::numbers;
use super::sample::{Refusal, check_vocabulary};

/// Which hint teaches which ids, and how much each counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Distillation {
    /// Which hint.
    pub selection: HintSelection,
    /// Which ids.
    pub subset: SubsetIds,
    /// Whose probabilities weigh them.
    pub weights: DistillWeights,
}

impl Default for Distillation {
    fn default() -> Self {
        let weights = DistillWeights::Policy;
        Self { selection: HintSelection::Sequence, subset: SubsetIds::Student, weights }
    }
}

/// A row's top-k columns; every list is row-major, `k` entries per response
/// token.
#[derive(Debug, Clone, PartialEq)]
pub struct Topk {
    k: usize,
    student_ids: Vec<i32>,
    /// Each candidate that has all that is needed.
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, PartialEq)]
struct Candidate {
    ids: Vec<i32>,
    log_probs: Vec<f32>,
    at_student: Option<Vec<f32>>,
}

/// Reads a row's top-k columns. Nothing, if no candidate has them.
pub(super) fn read(
    turn: &Turn,
    tokens: usize,
    vocabulary: i64,
    which: SubsetIds,
) -> Result<Option<Topk>, Refusal> {
    let (Some(k), Some(student_ids)) = (turn.topk.map(usize::from), &turn.student_topk_ids) else {
        return Ok(None);
    };
    let width = tokens * k;
    let fits = |column: &str, length: usize| match length == width {
        true => Ok(()),
        false => {
            let fault =
                format!("{column} has {length} values for {tokens} response ids times k = {k}");
            Err(Refusal::broken("contradictory", fault))
        }
    };
    fits("student_topk_ids", student_ids.len())?;
    check_vocabulary(&[student_ids], vocabulary)?;
    let mut candidates = Vec::new();
    for hint in 0..turn.teacher_topk_ids.as_ref().map_or(0, Vec::len) {
        let ids = cell(&turn.teacher_topk_ids, hint);
        let log_probs = cell(&turn.teacher_topk_log_probs, hint);
        let at_student = cell(&turn.teacher_at_student, hint).cloned();
        let (Some(ids), Some(log_probs)) = (ids, log_probs) else { continue };
        fits("teacher_topk_ids", ids.len())?;
        fits("teacher_topk_log_probs", log_probs.len())?;
        fits("teacher_at_student", at_student.as_ref().map_or(width, Vec::len))?;
        check_vocabulary(&[ids], vocabulary)?;
        for (column, values) in [
            ("teacher_topk_log_probs", Some(log_probs)),
            ("teacher_at_student", at_student.as_ref()),
        ] {
            // What is no number teaches nothing at its token; this is no log-prob.
            if let Some(value) = values.into_iter().flatten().find(|value| above_zero(**value)) {
                let fault = format!("{column} is {value} for hint {hint}, above 0");
                return Err(Refusal::broken("contradictory", fault));
            }
        }
        if at_student.is_some() || which != SubsetIds::Student {
            let (ids, log_probs) = (ids.clone(), log_probs.clone());
            candidates.push(Candidate { ids, log_probs, at_student });
        }
    }
    let student_ids = student_ids.clone();
    Ok((k > 0 && !candidates.is_empty()).then_some(Topk { k, student_ids, candidates }))
}

fn above_zero(value: f32) -> bool {
    value.is_finite() && bad_log_prob(value)
}

fn cell<T>(column: &Option<Vec<Option<T>>>, hint: usize) -> Option<&T> {
    column.as_ref()?.get(hint)?.as_ref()
}

/// Chooses who teaches what, over the whole answer.
pub(super) fn choose(topk: &Topk, how: Distillation) -> Result<Subset, TopkError> {
    let k = topk.k as i64;
    let ids = |list: &[i32]| Tensor::from_slice(list).to_kind(Kind::Int64).view([-1, k]);
    let values = |list: &[f32]| Tensor::from_slice(list).view([-1, k]);
    let stack = |each: &dyn Fn(&Candidate) -> Tensor| {
        Tensor::stack(&topk.candidates.iter().map(each).collect::<Vec<_>>(), 0)
    };
    let at_student = (how.subset == SubsetIds::Student)
        .then(|| stack(&|candidate| values(candidate.at_student.as_deref().unwrap_or_default())));
    let candidates = Candidates {
        student_ids: ids(&topk.student_ids),
        ids: stack(&|candidate| ids(&candidate.ids)),
        log_probs: stack(&|candidate| values(&candidate.log_probs)),
        at_student,
    };
    select_subset(&candidates, how.selection, how.subset, None)
}

/// What a sample's loss needs to distil. Lists over ids are row-major, `k`
/// entries per response token.
#[derive(Debug, Clone, PartialEq)]
pub struct Distilled {
    /// Entries per token.
    pub k: usize,
    /// The ids.
    pub ids: Vec<i64>,
    /// Which of them are taught.
    pub inside: Vec<bool>,
    /// What each is worth, weighted; 0 outside.
    pub advantages: Vec<f32>,
    /// The old policy's log-probs at the ids.
    pub old_log_probs: Vec<f32>,
    /// The teacher's; of those outside they say nothing.
    pub teacher: Vec<f32>,
    /// Per token: how far the teacher is from the old policy, `Σ_v w_v |d_v|`.
    pub gaps: Vec<f32>,
    /// Per token: the ids that the chosen candidate shares with the student.
    pub overlaps: Vec<f32>,
    /// Per token: whether the chosen candidate has a value that is not finite.
    pub unusable: Vec<bool>,
}

impl Distilled {
    /// Weighs a subset. The old log-probs are at the sample's temperature and at
    /// the teacher's.
    pub(super) fn new(
        subset: &Subset,
        old: Vec<f32>,
        like_teacher: &[f32],
        weights: DistillWeights,
        method: &Method,
    ) -> Self {
        let size = subset.ids.size();
        let limit = method.distill_clip.map(f64::from);
        let shaped = |list: &[f32]| Tensor::from_slice(list).view([size[0], size[1]]);
        let worth = topk_advantages(subset, &shaped(&old), &shaped(like_teacher), weights, limit);
        let gaps = (&worth.weights * worth.differences.abs()).sum_dim_intlist(
            &[-1i64][..],
            false,
            Kind::Float,
        );
        let flags = |tensor: &Tensor| numbers(tensor).iter().map(|flag| *flag != 0.0).collect();
        Self {
            k: size[1] as usize,
            ids: ids(subset),
            inside: flags(&subset.inside),
            advantages: numbers(&(worth.advantages * f64::from(method.distill_weight))),
            old_log_probs: old,
            teacher: numbers(&subset.teacher),
            gaps: numbers(&gaps),
            overlaps: numbers(&subset.overlap),
            unusable: flags(&subset.unusable),
        }
    }

    /// Returns how many ids of a token are taught.
    pub(super) fn size(&self, token: usize) -> usize {
        self.inside[token * self.k..][..self.k].iter().filter(|inside| **inside).count()
    }

    /// Returns whether a token's ids have no pull.
    pub(super) fn is_zero(&self, token: usize) -> bool {
        self.advantages[token * self.k..][..self.k].iter().all(|advantage| *advantage == 0.0)
    }
}

/// Returns the ids of a subset, row-major.
pub(super) fn ids(subset: &Subset) -> Vec<i64> {
    let flat = subset.ids.contiguous().view([-1]);
    let mut values = vec![0; flat.numel()];
    flat.copy_data(&mut values, flat.numel());
    values
}

/// Ids whose log-probs are wanted at each token of a batch, beside the token
/// itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Further<'a> {
    /// Most ids of a token.
    pub(super) k: usize,
    /// Per sample: ids per token and the ids themselves, if there are any.
    pub(super) ids: &'a [Option<(usize, Vec<i64>)>],
}

impl Further<'_> {
    /// No further ids.
    pub(super) const NONE: Further<'static> = Further { k: 0, ids: &[] };

    /// Returns the ids of each sample, with the most that any has per token.
    pub(super) fn of(ids: &[Option<(usize, Vec<i64>)>]) -> Further<'_> {
        Further { k: ids.iter().flatten().map(|(k, _)| *k).max().unwrap_or(0), ids }
    }

    /// Returns how many ids each token of a sample has.
    pub(super) fn count(&self, sample: usize) -> usize {
        self.ids.get(sample).and_then(Option::as_ref).map_or(0, |(k, _)| *k)
    }

    /// Returns one of a token's ids; nothing past the sample's own.
    pub(super) fn id(&self, sample: usize, token: usize, place: usize) -> Option<i64> {
        let (k, ids) = self.ids.get(sample)?.as_ref()?;
        (place < *k).then(|| ids[token * k + place])
    }
}
