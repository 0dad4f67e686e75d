//! Invariants of the columns that the stages after `serve` write.

use std::collections::HashSet;

use super::{Fault, LARGEST_ADVANTAGE, Rule, bad_advantage, bad_log_prob, bad_temperature};
use crate::trajectory::Turn;
use crate::trajectory::words::{RewardSource, SampleKind};

pub(super) const RULES: &[Rule] = &[
    Rule { says: "votes are -1, 0 or 1, and the score is their majority", check: score },
    Rule { says: "the judge's words match the votes, an error the lack of a score", check: judge },
    Rule { says: "hints are at most three, different, shortest first", check: hints },
    Rule { says: "hint votes are -1 or 1", check: hint_votes },
    Rule { says: "teacher columns have one entry per hint", check: candidates },
    Rule { says: "a candidate has log-probs or an error", check: candidate_errors },
    Rule { says: "teacher log-probs match the response ids", check: teacher_log_probs },
    Rule { says: "top-k columns are R times k wide", check: top_k },
    Rule { says: "a teacher is named, with its temperature", check: teacher },
    Rule { says: "a reward is between -1 and 1 and has a source", check: reward },
    Rule { says: "the kind of sample goes with its signals", check: sample_kind },
    Rule { says: "the mask is 0 or 1 per response id", check: loss_mask },
    Rule { says: "advantages are finite, one per response id", check: advantages },
];

const MOST_HINTS: usize = 3;

fn score(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    let votes = turn.votes.as_deref().unwrap_or_default();
    if let Some(vote) = votes.iter().flatten().find(|vote| !(-1..=1).contains(*vote)) {
        faults.push(Fault::new("votes", format!("{vote} is no vote")));
    }
    if turn.score != majority(votes) {
        let (score, votes) = (shown(turn.score), shown(majority(votes)));
        let what = format!("{score}, but the votes say {votes}");
        faults.push(Fault::new("score", what));
    }
    faults
}

/// The most frequent vote; a tie is 0, no vote is nothing.
fn majority(votes: &[Option<i8>]) -> Option<f32> {
    let counts = [-1, 0, 1].map(|vote| votes.iter().filter(|cast| **cast == Some(vote)).count());
    let most = counts.into_iter().max().filter(|most| *most > 0)?;
    match counts.map(|count| count == most) {
        [true, false, false] => Some(-1.0),
        [false, false, true] => Some(1.0),
        _ => Some(0.0),
    }
}

fn judge(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    if let (Some(votes), Some(texts)) = (&turn.votes, &turn.judge_text)
        && votes.len() != texts.len()
    {
        let what = format!("{} texts for {} votes", texts.len(), votes.len());
        faults.push(Fault::new("judge_text", what));
    }
    if turn.judge_error.is_some() && turn.score.is_some() {
        faults.push(Fault::new("judge_error", "there, although there is a score"));
    }
    faults
}

fn hints(turn: &Turn) -> Vec<Fault> {
    let Some(hints) = &turn.hints else { return Vec::new() };
    let mut faults = Vec::new();
    if hints.is_empty() || hints.len() > MOST_HINTS {
        let what = format!("{} hints, wanted 1 to {MOST_HINTS} or null", hints.len());
        faults.push(Fault::new("hints", what));
    }
    if hints.iter().any(|hint| hint.trim().is_empty()) {
        faults.push(Fault::new("hints", "one is empty"));
    }
    if !hints.is_sorted_by_key(|hint| hint.chars().count()) {
        faults.push(Fault::new("hints", "not sorted, shortest first"));
    }
    if hints.iter().collect::<HashSet<_>>().len() != hints.len() {
        faults.push(Fault::new("hints", "one is there twice"));
    }
    faults
}

fn hint_votes(turn: &Turn) -> Vec<Fault> {
    let votes = turn.hint_votes.as_deref().unwrap_or_default();
    let odd = votes.iter().flatten().find(|vote| ![-1, 1].contains(*vote));
    odd.map(|vote| Fault::new("hint_votes", format!("{vote} is no verdict"))).into_iter().collect()
}

fn candidates(turn: &Turn) -> Vec<Fault> {
    let hints = turn.hints.as_ref().map_or(0, Vec::len);
    let lengths = [
        ("teacher_log_probs", turn.teacher_log_probs.as_ref().map(Vec::len)),
        ("teacher_topk_ids", turn.teacher_topk_ids.as_ref().map(Vec::len)),
        ("teacher_topk_log_probs", turn.teacher_topk_log_probs.as_ref().map(Vec::len)),
        ("teacher_at_student", turn.teacher_at_student.as_ref().map(Vec::len)),
        ("teacher_error", turn.teacher_error.as_ref().map(Vec::len)),
    ];
    let wrong = lengths.into_iter().filter_map(|(column, length)| {
        let length = length.filter(|length| *length != hints)?;
        Some(Fault::new(column, format!("{length} candidates for {hints} hints")))
    });
    wrong.collect()
}

fn candidate_errors(turn: &Turn) -> Vec<Fault> {
    let Some(log_probs) = &turn.teacher_log_probs else { return Vec::new() };
    let errors = turn.teacher_error.as_deref().unwrap_or_default();
    let wrong = log_probs.iter().enumerate().filter_map(|(index, candidate)| {
        match (candidate, errors.get(index).and_then(Option::as_ref)) {
            (None, None) => Some(format!("candidate {index} has neither log-probs nor an error")),
            (Some(_), Some(_)) => Some(format!("candidate {index} has log-probs and an error")),
            _ => None,
        }
    });
    wrong.map(|what| Fault::new("teacher_error", what)).collect()
}

fn teacher_log_probs(turn: &Turn) -> Vec<Fault> {
    let column = "teacher_log_probs";
    let length = response_length(turn);
    let mut faults = Vec::new();
    for (index, candidate) in turn.teacher_log_probs.iter().flatten().enumerate() {
        let Some(candidate) = candidate else { continue };
        if Some(candidate.len()) != length {
            let what = format!("candidate {index}: {} values for {}", candidate.len(), ids(length));
            faults.push(Fault::new(column, what));
        }
        if let Some(value) = candidate.iter().find(|value| bad_log_prob(**value)) {
            faults.push(Fault::new(column, format!("candidate {index}: {value} is no log-prob")));
        }
    }
    faults
}

fn top_k(turn: &Turn) -> Vec<Fault> {
    let k = usize::from(turn.topk.unwrap_or_default());
    let wanted = response_length(turn).map(|length| length * k);
    let mut faults = Vec::new();
    let empty = turn.teacher_topk_ids.is_none() && turn.student_topk_ids.is_none();
    if turn.topk.is_some() && empty && turn.teacher_error.is_none() {
        faults.push(Fault::new("topk", format!("{k}, but there are no top-k columns")));
    }
    let mut width = |column: &'static str, length: usize| {
        if Some(length) != wanted {
            let what = format!("{length} values for {} times k = {k}", ids(response_length(turn)));
            faults.push(Fault::new(column, what));
        }
    };
    let inner = |lists: &Option<Vec<Option<Vec<f32>>>>| -> Vec<f32> {
        lists.iter().flatten().flatten().flatten().copied().collect()
    };
    turn.teacher_topk_ids
        .iter()
        .flatten()
        .flatten()
        .for_each(|x| width("teacher_topk_ids", x.len()));
    for (column, lists) in [
        ("teacher_topk_log_probs", &turn.teacher_topk_log_probs),
        ("teacher_at_student", &turn.teacher_at_student),
    ] {
        lists.iter().flatten().flatten().for_each(|list| width(column, list.len()));
    }
    turn.student_topk_ids.iter().for_each(|list| width("student_topk_ids", list.len()));
    turn.student_topk_log_probs.iter().for_each(|list| width("student_topk_log_probs", list.len()));
    for (column, values) in [
        ("teacher_topk_log_probs", inner(&turn.teacher_topk_log_probs)),
        ("teacher_at_student", inner(&turn.teacher_at_student)),
        ("student_topk_log_probs", turn.student_topk_log_probs.clone().unwrap_or_default()),
    ] {
        if let Some(value) = values.iter().find(|value| bad_log_prob(**value)) {
            faults.push(Fault::new(column, format!("{value} is no log-prob")));
        }
    }
    let teachers = turn.teacher_topk_ids.iter().flatten().flatten();
    let lists = teachers.map(|ids| ("teacher_topk_ids", ids));
    for (column, ids) in
        lists.chain(turn.student_topk_ids.iter().map(|ids| ("student_topk_ids", ids)))
    {
        if ids.iter().any(|id| *id < 0) {
            faults.push(Fault::new(column, "an id is negative"));
        }
        let twice =
            ids.chunks(k.max(1)).any(|row| row.iter().collect::<HashSet<_>>().len() < row.len());
        if twice {
            faults.push(Fault::new(column, "an id is there twice at one position"));
        }
    }
    faults
}

fn teacher(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    let any = turn.teacher_log_probs.iter().flatten().any(Option::is_some);
    if any && turn.teacher.is_none() {
        faults.push(Fault::new("teacher", "null beside teacher_log_probs"));
    }
    if any && turn.teacher_temperature.is_none() {
        faults.push(Fault::new("teacher_temperature", "null beside teacher_log_probs"));
    }
    if let Some(temperature) = turn.teacher_temperature
        && bad_temperature(temperature)
    {
        faults.push(Fault::new("teacher_temperature", format!("{temperature}")));
    }
    faults
}

fn reward(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    if let Some(reward) = turn.reward
        && !(-1.0..=1.0).contains(&reward)
    {
        faults.push(Fault::new("reward", format!("{reward}, wanted -1 to 1")));
    }
    if turn.reward.is_some() != turn.reward_source.is_some() {
        let what = format!("{} with reward {}", shown(turn.reward_source), shown(turn.reward));
        faults.push(Fault::new("reward_source", what));
    }
    let source = match turn.reward_source {
        Some(RewardSource::Judged) => Some(("score", turn.score)),
        Some(RewardSource::Explicit) => Some(("reward_explicit", turn.reward_explicit)),
        _ => None,
    };
    if let Some((column, value)) = source
        && value != turn.reward
    {
        let what = format!("{}, but {column} is {}", shown(turn.reward), shown(value));
        faults.push(Fault::new("reward", what));
    }
    faults
}

fn sample_kind(turn: &Turn) -> Vec<Fault> {
    let Some(kind) = turn.sample_kind else { return Vec::new() };
    let column = "sample_kind";
    let mut faults = Vec::new();
    let distils = matches!(kind, SampleKind::Opd | SampleKind::OpdRl);
    let rewards = matches!(kind, SampleKind::Rl | SampleKind::OpdRl);
    let rewarded = turn.reward.is_some_and(|reward| reward != 0.0);
    let hinted = turn.teacher_log_probs.iter().flatten().any(Option::is_some);
    if distils && turn.hints.as_ref().is_none_or(Vec::is_empty) {
        faults.push(Fault::new(column, format!("`{kind}` without a hint")));
    }
    if rewards && !rewarded {
        faults.push(Fault::new(column, format!("`{kind}` with reward {}", shown(turn.reward))));
    }
    // What cannot be trained on, or was refused, may have no kind in spite of
    // its signals.
    if turn.untrainable_reason.is_none() && turn.advantage_error.is_none() {
        if rewarded && !rewards {
            faults.push(Fault::new(column, format!("`{kind}` with reward {}", shown(turn.reward))));
        }
        if hinted && !distils {
            faults.push(Fault::new(column, format!("`{kind}` with a usable hint")));
        }
    }
    if kind == SampleKind::None && turn.sample_reason.is_none() {
        faults.push(Fault::new("sample_reason", "null beside sample_kind `none`"));
    }
    faults
}

fn loss_mask(turn: &Turn) -> Vec<Fault> {
    let Some(mask) = &turn.loss_mask else { return Vec::new() };
    let mut faults = length("loss_mask", mask.len(), turn);
    if let Some(value) = mask.iter().find(|value| ![0, 1].contains(*value)) {
        faults.push(Fault::new("loss_mask", format!("{value}, wanted 0 or 1")));
    }
    if turn.sample_kind == Some(SampleKind::None) && mask.contains(&1) {
        faults.push(Fault::new("loss_mask", "1 beside sample_kind `none`"));
    }
    if turn.untrainable_reason.is_some() && mask.contains(&1) {
        faults.push(Fault::new("loss_mask", "1 in a row that must not be trained on"));
    }
    faults
}

fn advantages(turn: &Turn) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (column, values) in
        [("rl_advantages", &turn.rl_advantages), ("advantages", &turn.advantages)]
    {
        let Some(values) = values else { continue };
        faults.extend(length(column, values.len(), turn));
        if let Some(value) = values.iter().find(|value| bad_advantage(**value)) {
            let what = match value.is_finite() {
                true => format!("{value:?}, more than {LARGEST_ADVANTAGE} in size"),
                false => format!("{value} is not finite"),
            };
            faults.push(Fault::new(column, what));
        }
    }
    if turn.advantages.is_some() && turn.advantage_error.is_some() {
        faults.push(Fault::new("advantage_error", "there, although there are advantages"));
    }
    faults
}

fn length(column: &'static str, found: usize, turn: &Turn) -> Vec<Fault> {
    let wanted = response_length(turn);
    match found == wanted.unwrap_or_default() {
        true => Vec::new(),
        false => vec![Fault::new(column, format!("{found} values for {}", ids(wanted)))],
    }
}

fn response_length(turn: &Turn) -> Option<usize> {
    turn.response_ids.as_ref().map(Vec::len)
}

fn ids(length: Option<usize>) -> String {
    length.map_or_else(|| "no response ids".to_owned(), |length| format!("{length} response ids"))
}

/// The value, or `null`.
fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}
