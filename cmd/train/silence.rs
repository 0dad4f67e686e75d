//! Why a run made no step, in the ledger's words, and what helps.

use std::collections::BTreeMap;

use oclaw::advantage::Estimator;

use crate::visible::visible;

/// Lists reasons with their counts, the most frequent first.
pub(super) fn reasons(refused: &BTreeMap<String, u64>) -> String {
    let mut counts: Vec<_> = refused.iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let told = |(reason, count): &(&String, &u64)| {
        let turns = if **count == 1 { "turn" } else { "turns" };
        format!("{count} {turns}: {}", visible(reason))
    };
    counts.iter().map(told).collect::<Vec<_>>().join("; ")
}

/// Returns what was refused since `before`.
pub(super) fn since(
    before: &BTreeMap<String, u64>,
    after: &BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    let more = |(reason, count): (&String, &u64)| {
        let more = count - before.get(reason).copied().unwrap_or_default();
        (more > 0).then(|| (reason.clone(), more))
    };
    after.iter().filter_map(more).collect()
}

/// Why a batch made no step in which nothing pulls at the weights.
const ZERO: &str = "zero_advantage";

/// Returns whether it was for want of any advantage that a batch made no step.
pub(super) fn is_zero(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> bool {
    since(before, after).contains_key(ZERO)
}

/// Says what batches without any advantage come of.
pub(super) fn zero(estimator: Estimator) -> &'static str {
    match estimator {
        Estimator::Opd => {
            "every distillation advantage is 0: teacher and policy agree, or the hint was lost"
        }
        Estimator::TopkKl => {
            "the teacher pulls at nothing: it and the policy agree, or `--w-opd` is 0"
        }
        Estimator::Combine | Estimator::Hybrid => {
            "every advantage is 0: look at the rewards, at the hints, `--w-rl` and `--w-opd`"
        }
        Estimator::Grpo
        | Estimator::Rloo
        | Estimator::ReinforcePlusPlus
        | Estimator::ReinforcePlusPlusBaseline
        | Estimator::Gae => {
            "every advantage is 0: the rewards of a group, or of the batch, are all alike"
        }
    }
}

/// Returns what helps against the most frequent reason.
pub(super) fn hint(refused: &BTreeMap<String, u64>, estimator: Estimator) -> Option<&'static str> {
    let (reason, _) = refused.iter().max_by_key(|(_, count)| **count)?;
    Some(match reason.as_str() {
        "version_missing" => {
            "`--version-alias none=0` takes rows without a weight version for the start model's"
        }
        "version_unknown" => "`--version-alias NAME=STEP` says what a weight version stands for",
        "version_from_the_future" => {
            "the rows are of a later policy than the newest of `--out`: is it the right folder?"
        }
        "stale" => "`--max-staleness STEPS` takes rows of older policies",
        "temperature_unknown" => "`--assume-temperature T` says at which they were sampled",
        "already_trained" => "the ledger of `--out` has these turns: give it new ones",
        "duplicate_turn_id" => "a turn id stands for one row: `oclaw lint` names the others",
        "no_token_ids" | "retokenized" | "empty_response" => {
            "only answers whose token ids the server gave can be trained: \
             `oclaw serve` asks for them, of a server that has them"
        }
        "failed" | "aborted" => "answers that did not end cannot be trained",
        "no_log_probs" => "`--old-log-probs recompute` needs none of the server's log-probs",
        "teacher_temperature_differs" => {
            "`--old-log-probs recompute` compares at the teacher's temperature"
        }
        "no_topk" => "run `oclaw teacher-lp --topk 4`",
        "no_signal_for_estimator" => "another `--estimator` may use what these rows carry",
        ZERO => zero(estimator),
        "not_finite_step" => {
            "the loss or its gradient overflowed: look at the weights of its terms, and with \
             `oclaw stats` at the rows"
        }
        "contradictory"
        | "advantage_error"
        | "foreign_token_id"
        | "log_prob_not_finite"
        | "no_turn_id" => "`oclaw lint` names what is wrong with a row",
        "masked" => "`loss_mask` leaves no token: `oclaw advantage --replace` makes it anew",
        _ => {
            "look at the rows with `oclaw explain`: a turn needs a reward that is not 0, or a hint"
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect()
    }

    #[test]
    fn the_most_frequent_reason_comes_first_and_is_helped() {
        let refused =
            counts(&[("already_trained", 1), ("judged_neutral, no_hint", 2), ("stale", 5)]);
        let told = "5 turns: stale; 2 turns: judged_neutral, no_hint; 1 turn: already_trained";
        assert_eq!(reasons(&refused), told);
        assert!(hint(&refused, Estimator::Grpo).unwrap().contains("--max-staleness"));
        assert_eq!(
            since(&counts(&[("stale", 4), ("already_trained", 1)]), &refused),
            counts(&[("judged_neutral, no_hint", 2), ("stale", 1)])
        );
        assert_eq!(hint(&counts(&[]), Estimator::Grpo), None);
    }

    #[test]
    fn batches_without_any_advantage_are_told_by_what_the_estimator_reads() {
        let (before, after) =
            (counts(&[("stale", 1)]), counts(&[("stale", 1), ("zero_advantage", 2)]));
        assert!(is_zero(&before, &after) && !is_zero(&after, &after));
        for (estimator, wanted) in [
            (Estimator::Opd, "teacher and policy agree"),
            (Estimator::TopkKl, "or `--w-opd` is 0"),
            (Estimator::Combine, "look at the rewards, at the hints"),
            (Estimator::Hybrid, "look at the rewards, at the hints"),
            (Estimator::Grpo, "are all alike"),
            (Estimator::Rloo, "are all alike"),
        ] {
            let told = hint(&after, estimator).unwrap();
            assert!(told.contains(wanted) && told == zero(estimator), "{estimator}: {told}");
        }
    }
}
