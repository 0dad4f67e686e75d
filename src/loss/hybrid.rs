//! Top-k distillation with several hints (the hybrid loss of OpenClaw-RL, 2026):
//! which hint teaches a token, which ids it teaches, and the loss over them.
//!
//! Positions are the `R` tokens of one answer, `k` ids each, `H` candidates (one
//! per hint). [`select_subset`] sees whole answers, masked tokens included; what it
//! returns is cut down to trained tokens afterwards.

use tch::{Kind, Tensor};

use super::{Clip, Surrogate, ppo_clip};

/// Which candidate teaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HintSelection {
    /// The one whose ids overlap the student's most over the whole answer, or
    /// over each span of it.
    Sequence,
    /// The one whose ids overlap the student's most at the token.
    Token,
    /// The first: hints are kept shortest first.
    Shortest,
}

/// Which ids are taught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubsetIds {
    /// The student's top-k.
    Student,
    /// The chosen candidate's top-k.
    Teacher,
    /// Those in both.
    Overlap,
}

/// What an answer's candidates say.
#[derive(Debug)]
pub struct Candidates {
    /// The student's top-k ids, `[R, k]`.
    pub student_ids: Tensor,
    /// Each candidate's own top-k ids, `[H, R, k]`.
    pub ids: Tensor,
    /// Their log-probs, `[H, R, k]`.
    pub log_probs: Tensor,
    /// Each candidate's log-probs at the student's ids, `[H, R, k]`. Only
    /// [`SubsetIds::Student`] reads them.
    pub at_student: Option<Tensor>,
}

/// Why candidates cannot be used at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopkError {
    /// One id stands twice at a position: its probability would count twice.
    #[error("{whose} has an id twice at token {token}")]
    RepeatedId {
        /// The list it is in.
        whose: String,
        /// The token, counted from 0.
        token: i64,
    },
    /// Nobody teaches.
    #[error("there is no candidate")]
    NoCandidate,
    /// The student's ids are to be taught, but no candidate was asked for them.
    #[error("there are no teacher log-probs at the student's ids")]
    NotAtStudent,
}

/// The ids that are taught at each position, and by whom.
#[derive(Debug)]
pub struct Subset {
    /// The ids, `[R, k]`.
    pub ids: Tensor,
    /// Which of them are in the subset, `[R, k]`, boolean.
    pub inside: Tensor,
    /// The chosen candidate's log-probs at them, `[R, k]`; 0 outside.
    pub teacher: Tensor,
    /// The chosen candidate, `[R]`.
    pub chosen: Tensor,
    /// How many of its ids are among the student's, `[R]`.
    pub overlap: Tensor,
    /// Whether the chosen candidate cannot be used there, `[R]`, boolean: one of
    /// its values is not finite. Nothing is taught at such a position.
    pub unusable: Tensor,
}

impl Subset {
    /// Returns the subset at some positions only.
    pub fn at(&self, positions: &Tensor) -> Self {
        let pick = |values: &Tensor| values.index_select(0, positions);
        Self {
            ids: pick(&self.ids),
            inside: pick(&self.inside),
            teacher: pick(&self.teacher),
            chosen: pick(&self.chosen),
            overlap: pick(&self.overlap),
            unusable: pick(&self.unusable),
        }
    }

    /// Returns the number of ids at each position.
    pub fn size(&self) -> Tensor {
        self.inside.sum_dim_intlist(&[-1i64][..], false, Kind::Float)
    }
}

/// Chooses a candidate at each position and the ids that it teaches there.
///
/// Ties go to the first. A candidate with a value that is not finite overlaps
/// nothing at that position. `spans` (half-open, of tokens) divide the answer
/// for [`HintSelection::Sequence`]; outside every span the first candidate is
/// chosen.
pub fn select_subset(
    candidates: &Candidates,
    selection: HintSelection,
    which: SubsetIds,
    spans: Option<&[(i64, i64)]>,
) -> Result<Subset, TopkError> {
    let Candidates { student_ids, ids, log_probs, .. } = candidates;
    if ids.size()[0] == 0 {
        return Err(TopkError::NoCandidate);
    }
    check_ids(student_ids, ids)?;
    let values = match (which, &candidates.at_student) {
        (SubsetIds::Student, None) => return Err(TopkError::NotAtStudent),
        (SubsetIds::Student, Some(at_student)) => at_student,
        (SubsetIds::Teacher | SubsetIds::Overlap, _) => log_probs,
    };
    let finite = values.isfinite().all_dim(-1, false);
    let overlap = topk_overlap(student_ids, ids);
    // Below an overlap of 0: chosen only where nobody can be used.
    let score = overlap.where_self(&finite, &overlap.full_like(-1));
    let chosen = choose(&score, selection, spans);
    let of_chosen = |values: &Tensor| {
        let (length, k) = (values.size()[1], values.size()[2]);
        let index = chosen.view([1, length, 1]).expand([1, length, k], false);
        values.gather(0, &index, false).squeeze_dim(0)
    };
    let at_chosen = |values: &Tensor| values.gather(0, &chosen.unsqueeze(0), false).squeeze_dim(0);
    let usable = at_chosen(&finite);
    let (ids, inside, teacher) = match which {
        SubsetIds::Student => {
            (student_ids.shallow_clone(), usable.unsqueeze(-1), of_chosen(values))
        }
        // Of no ids the place of one cannot be found: nothing is in both.
        SubsetIds::Overlap if student_ids.size()[1] == 0 || ids.size()[2] == 0 => {
            let none = student_ids.zeros_like();
            (student_ids.shallow_clone(), none.to_kind(Kind::Bool), none.to_kind(values.kind()))
        }
        SubsetIds::Teacher => (of_chosen(ids), usable.unsqueeze(-1), of_chosen(values)),
        SubsetIds::Overlap => {
            let equal = student_ids.unsqueeze(-1).eq_tensor(&of_chosen(ids).unsqueeze(-2));
            let inside = equal.any_dim(-1, false).logical_and(&usable.unsqueeze(-1));
            // The place of each of the student's ids in the candidate's list.
            let place = equal.to_kind(Kind::Int64).argmax(-1, false);
            (student_ids.shallow_clone(), inside, of_chosen(values).gather(-1, &place, false))
        }
    };
    let inside = inside.expand_as(&ids).contiguous();
    Ok(Subset {
        teacher: teacher.where_self(&inside, &teacher.zeros_like()),
        ids,
        inside,
        overlap: at_chosen(&overlap),
        chosen,
        unusable: usable.logical_not(),
    })
}

/// Counts the ids that each candidate shares with the student, `[H, R]`.
pub fn topk_overlap(student_ids: &Tensor, ids: &Tensor) -> Tensor {
    let equal = student_ids.unsqueeze(-1).eq_tensor(&ids.unsqueeze(-2));
    equal.to_kind(Kind::Int64).sum_dim_intlist(&[-1i64, -2][..], false, Kind::Int64)
}

fn choose(score: &Tensor, selection: HintSelection, spans: Option<&[(i64, i64)]>) -> Tensor {
    let length = score.size()[1];
    let chosen = Tensor::zeros([length], (Kind::Int64, score.device()));
    let whole = [(0, length)];
    match selection {
        HintSelection::Shortest => chosen,
        HintSelection::Token => first_largest(score),
        HintSelection::Sequence => {
            for (start, end) in spans.unwrap_or(&whole).iter().filter(|span| span.0 < span.1) {
                let part = score.narrow(1, *start, end - start).clamp_min(0);
                let best = first_largest(&part.sum_dim_intlist(&[1i64][..], true, Kind::Int64));
                chosen.narrow(0, *start, end - start).copy_(&best);
            }
            chosen
        }
    }
}

/// Returns the row with the largest score of each column; of equals the first,
/// which `argmax` does not promise.
fn first_largest(score: &Tensor) -> Tensor {
    let mut best = score.get(0);
    let mut chosen = best.zeros_like();
    for candidate in 1..score.size()[0] {
        let challenger = score.get(candidate);
        let better = challenger.gt_tensor(&best);
        chosen = chosen.full_like(candidate).where_self(&better, &chosen);
        best = challenger.where_self(&better, &best);
    }
    chosen
}

fn check_ids(student_ids: &Tensor, ids: &Tensor) -> Result<(), TopkError> {
    let repeated = |ids: &Tensor, whose: String| match first_repeated(ids) {
        Some(token) => Err(TopkError::RepeatedId { whose, token }),
        None => Ok(()),
    };
    repeated(student_ids, "the student's top-k".to_owned())?;
    for candidate in 0..ids.size()[0] {
        repeated(&ids.get(candidate), format!("candidate {candidate}'s top-k"))?;
    }
    Ok(())
}

fn first_repeated(ids: &Tensor) -> Option<i64> {
    let k = ids.size()[1];
    let (sorted, _) = ids.sort(-1, false);
    let equal = match k {
        0 | 1 => return None,
        _ => sorted.narrow(1, 1, k - 1).eq_tensor(&sorted.narrow(1, 0, k - 1)),
    };
    let tokens = equal.any_dim(-1, false).nonzero();
    (tokens.numel() > 0).then(|| tokens.int64_value(&[0, 0]))
}

/// What each id of a subset is worth. All constants, `[N, k]`, 0 outside.
#[derive(Debug)]
pub struct TopkAdvantages {
    /// `w_v d_v`.
    pub advantages: Tensor,
    /// `w_v`: probabilities, scaled to 1 over the subset.
    pub weights: Tensor,
    /// `d_v = clip(lt(v) - lo(v), ±C)`.
    pub differences: Tensor,
}

/// Whose probabilities `w_v` weigh a subset's ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DistillWeights {
    /// The old policy's, as the reference has it: reverse KL's. It hardly teaches an id that
    /// the policy hardly ever says.
    #[default]
    Policy,
    /// The teacher's, as in forward KL.
    Teacher,
}

/// Returns the advantages of a subset's ids. `old` are the old policy's
/// log-probs at them, `old_like_teacher` the same at the teacher's temperature,
/// `limit` is `C`.
pub fn topk_advantages(
    subset: &Subset,
    old: &Tensor,
    old_like_teacher: &Tensor,
    weights: DistillWeights,
    limit: Option<f64>,
) -> TopkAdvantages {
    let inside = &subset.inside;
    let zero = old.zeros_like();
    let whose = match weights {
        DistillWeights::Policy => old,
        DistillWeights::Teacher => &subset.teacher,
    };
    let kept = whose.where_self(inside, &old.full_like(f64::NEG_INFINITY));
    // An empty subset has no softmax.
    let weights = kept.softmax(-1, old.kind()).where_self(inside, &zero).detach();
    let differences = (&subset.teacher - old_like_teacher).where_self(inside, &zero).detach();
    let differences = match limit {
        Some(limit) => differences.clamp(-limit, limit),
        None => differences,
    };
    TopkAdvantages { advantages: &weights * &differences, weights, differences }
}

/// PPO's clipped surrogate at each id, summed over the subset: `[N]`. `clipped`
/// is the share of the subset's ids where the clip decided. A position without
/// ids gives 0 and no gradient.
pub fn topk_surrogate(
    log_ratio: &Tensor,
    advantages: &Tensor,
    inside: &Tensor,
    clip: &Clip,
) -> Surrogate {
    let zero = log_ratio.zeros_like();
    let entries = ppo_clip(&log_ratio.where_self(inside, &zero), advantages, clip);
    let over_ids = |values: Tensor| {
        values.where_self(inside, &zero).sum_dim_intlist(&[-1i64][..], false, zero.kind())
    };
    let size = inside.sum_dim_intlist(&[-1i64][..], false, zero.kind()).clamp_min(1.0);
    Surrogate { loss: over_ids(entries.loss), clipped: over_ids(entries.clipped) / size }
}
