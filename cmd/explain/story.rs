//! All that is known of a turn, put in order.

use oclaw::advantage;
use oclaw::table::row_json::instant;
use oclaw::template::Tokenizer;
use oclaw::trajectory::Turn;
use oclaw::trajectory::message::{parse, words};
use oclaw::trajectory::words::SampleKind;
use serde::Serialize;
use serde_json::Value;

use crate::reduction::ReductionName;

/// A message: who, and what.
#[derive(Debug, Serialize)]
pub(super) struct Said {
    pub(super) role: String,
    pub(super) text: String,
}

/// A vote and the judge's words behind it.
#[derive(Debug, Serialize)]
pub(super) struct Vote {
    pub(super) vote: Option<i8>,
    pub(super) text: Option<String>,
}

/// A hint and what the teacher made of it.
#[derive(Debug, Serialize)]
pub(super) struct Hint {
    pub(super) text: String,
    /// Whether its log-probs are the ones that teach.
    pub(super) chosen: bool,
    /// Whether the teacher gave log-probs; `None` if it was not asked.
    pub(super) scored: Option<bool>,
    pub(super) error: Option<String>,
}

/// One response token.
#[derive(Debug, Serialize)]
pub(super) struct Token {
    pub(super) id: i32,
    pub(super) text: Option<String>,
    pub(super) server: Option<f32>,
    pub(super) teacher: Option<f32>,
    pub(super) advantage: Option<f32>,
    pub(super) mask: Option<i8>,
    /// What it adds to the loss of the batch.
    pub(super) loss: Option<f64>,
}

/// What a turn is in a batch of all rows read.
#[derive(Debug, Serialize)]
pub(super) struct Share {
    /// Rows with a token to train.
    pub(super) batch_turns: u64,
    /// Tokens to train in all of them.
    pub(super) batch_tokens: u64,
    /// Those of this turn.
    pub(super) tokens: u64,
    /// Their part of all.
    pub(super) token_share: Option<f64>,
    /// How the losses of tokens become one.
    pub(super) reduction: ReductionName,
    /// The turn's part of the sum of `|A|`, each weighted as in the loss.
    pub(super) advantage_share: Option<f64>,
    /// What the turn adds to the loss.
    pub(super) loss: Option<f64>,
    /// The loss of the whole batch.
    pub(super) batch_loss: Option<f64>,
    /// What of the loss these numbers are.
    pub(super) loss_part: Loss,
}

/// How much of the loss advantages are, by the estimator that made the table.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Loss {
    /// All of it.
    Whole,
    /// The policy term of `hybrid`, beside which a hint has one of its own.
    PolicyTerm,
    /// Nothing: `topk-kl` has the KL from the teacher in their place.
    Nothing,
}

impl Loss {
    pub(super) fn of(estimator: Option<&str>) -> Self {
        match estimator {
            Some("topk-kl") => Self::Nothing,
            Some("hybrid") => Self::PolicyTerm,
            _ => Self::Whole,
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Story {
    pub(super) turn_id: String,
    pub(super) session_id: String,
    pub(super) turn: u32,
    pub(super) branch: String,
    /// Nothing if the log that the turn was imported from tells no time.
    pub(super) created_at: Option<String>,
    pub(super) model: String,
    pub(super) weight_version: Option<String>,
    pub(super) weight_version_end: Option<String>,
    pub(super) status: String,
    pub(super) finish_reason: Option<String>,
    /// Messages of the whole prompt.
    pub(super) messages: usize,
    /// The last of them.
    pub(super) prompt: Vec<Said>,
    pub(super) answer: String,
    pub(super) next_state_kind: String,
    pub(super) next_state: Vec<Said>,
    pub(super) score: Option<f32>,
    pub(super) votes: Vec<Vote>,
    pub(super) judge_error: Option<String>,
    pub(super) hints: Vec<Hint>,
    pub(super) hint_votes: Option<Vec<Option<i8>>>,
    pub(super) hint_error: Option<String>,
    pub(super) reward: Option<f32>,
    pub(super) reward_source: Option<String>,
    /// How it came about, in words.
    pub(super) reward_reason: String,
    pub(super) feedback_text: Option<String>,
    pub(super) sample_kind: Option<String>,
    pub(super) sample_reason: Option<String>,
    pub(super) untrainable_reason: Option<String>,
    pub(super) promoted: Option<bool>,
    pub(super) advantage_error: Option<String>,
    pub(super) share: Share,
    pub(super) tokens: Vec<Token>,
}

/// All rows read, as if they were one batch.
#[derive(Debug)]
pub(super) struct Batch {
    reduction: ReductionName,
    of: Loss,
    turns: u64,
    tokens: u64,
    /// Sum of `|A|` over those tokens, where there is an A, weighted within its turn.
    size: f64,
    /// The same sum of -A.
    loss: f64,
    /// Whether every trained token has an A.
    known: bool,
}

/// Returns the tokens that are trained. A row without a signal has none.
fn trained(turn: &Turn) -> impl Iterator<Item = usize> + '_ {
    let silent = matches!(turn.sample_kind, None | Some(SampleKind::None));
    let mask = turn.loss_mask.as_deref().filter(|_| !silent).unwrap_or_default();
    mask.iter().enumerate().filter(|(_, flag)| **flag == 1).map(|(token, _)| token)
}

fn advantage_of(turn: &Turn, token: usize) -> Option<f32> {
    turn.advantages.as_ref()?.get(token).copied().filter(|value| value.is_finite())
}

/// Sums a function of A over the trained tokens that have one.
fn sum(turn: &Turn, of: fn(f64) -> f64) -> f64 {
    trained(turn).filter_map(|token| advantage_of(turn, token)).map(|a| of(f64::from(a))).sum()
}

/// Whether every trained token has an A.
fn known(turn: &Turn) -> bool {
    trained(turn).all(|token| advantage_of(turn, token).is_some())
}

impl Batch {
    pub(super) fn new(reduction: ReductionName, of: Loss) -> Self {
        let known = of != Loss::Nothing;
        Self { reduction, of, turns: 0, tokens: 0, size: 0.0, loss: 0.0, known }
    }

    /// Returns the tokens of a turn that are trained: of turns without a hint none, where
    /// hints alone are learned from.
    fn trained<'a>(&self, turn: &'a Turn) -> impl Iterator<Item = usize> + use<'a> {
        let taught = matches!(turn.sample_kind, Some(SampleKind::Opd | SampleKind::OpdRl));
        let passed_over = self.of == Loss::Nothing && !taught;
        trained(turn).filter(move |_| !passed_over)
    }

    pub(super) fn add(&mut self, turn: &Turn) {
        let tokens = self.trained(turn).count() as u64;
        if tokens == 0 {
            return;
        }
        self.turns += 1;
        self.tokens += tokens;
        self.known &= known(turn);
        let weight = self.weight_within(tokens);
        self.size += weight * sum(turn, f64::abs);
        self.loss += weight * sum(turn, |advantage| -advantage);
    }

    /// Returns the weight of a token as far as its own turn decides it.
    fn weight_within(&self, tokens: u64) -> f64 {
        match self.reduction {
            ReductionName::Sample => 1.0 / tokens as f64,
            ReductionName::Token => 1.0,
        }
    }

    /// Returns the number by which the sums over all turns are divided.
    fn divisor(&self) -> f64 {
        match self.reduction {
            ReductionName::Sample => self.turns as f64,
            ReductionName::Token => self.tokens as f64,
        }
    }
}

impl Story {
    pub(super) fn of(
        turn: &Turn,
        batch: &Batch,
        tokenizer: Option<&Tokenizer>,
        tail: usize,
    ) -> Self {
        let prompt = said(&turn.messages);
        let messages = prompt.len();
        Self {
            turn_id: turn.turn_id.clone(),
            session_id: turn.session_id.clone(),
            turn: turn.turn,
            branch: turn.branch.clone(),
            created_at: turn.asked_at().map(instant),
            model: turn.model.clone(),
            weight_version: turn.weight_version.clone(),
            weight_version_end: turn.weight_version_end.clone(),
            status: turn.status.to_string(),
            finish_reason: turn.finish_reason.clone(),
            messages,
            prompt: prompt.into_iter().skip(messages.saturating_sub(tail)).collect(),
            answer: words(&parse(&turn.response)),
            next_state_kind: turn.next_state_kind.to_string(),
            next_state: turn.next_state.as_deref().map(said).unwrap_or_default(),
            score: turn.score,
            votes: votes(turn),
            judge_error: turn.judge_error.clone(),
            hints: hints(turn),
            hint_votes: turn.hint_votes.clone(),
            hint_error: turn.hint_error.clone(),
            reward: turn.reward,
            reward_source: turn.reward_source.map(|source| source.to_string()),
            reward_reason: reward_reason(turn),
            feedback_text: turn.feedback_text.clone(),
            sample_kind: turn.sample_kind.map(|kind| kind.to_string()),
            sample_reason: turn.sample_reason.clone(),
            untrainable_reason: turn.untrainable_reason.clone(),
            promoted: turn.promoted,
            advantage_error: turn.advantage_error.clone(),
            share: share(turn, batch),
            tokens: tokens(turn, batch, tokenizer),
        }
    }
}

fn said(text: &str) -> Vec<Said> {
    let of = |message: &Value| Said {
        role: message["role"].as_str().unwrap_or("?").to_owned(),
        text: words(message),
    };
    match parse(text) {
        Value::Array(messages) => messages.iter().map(of).collect(),
        other => vec![of(&other)],
    }
}

fn votes(turn: &Turn) -> Vec<Vote> {
    let texts = turn.judge_text.as_deref().unwrap_or_default();
    let text = |place: usize| texts.get(place).cloned().flatten();
    let votes = turn.votes.as_deref().unwrap_or_default();
    votes.iter().enumerate().map(|(place, vote)| Vote { vote: *vote, text: text(place) }).collect()
}

/// Returns the candidate whose log-probs teach.
fn chosen(turn: &Turn) -> Option<usize> {
    advantage::resolve(turn).ok().and_then(|signals| signals.teacher)
}

fn hints(turn: &Turn) -> Vec<Hint> {
    let chosen = chosen(turn);
    let hint = |(place, text): (usize, &String)| Hint {
        text: text.clone(),
        chosen: chosen == Some(place),
        scored: turn
            .teacher_log_probs
            .as_ref()
            .map(|it| it.get(place).is_some_and(Option::is_some)),
        error: turn.teacher_error.as_ref().and_then(|it| it.get(place).cloned().flatten()),
    };
    turn.hints.iter().flatten().enumerate().map(hint).collect()
}

fn reward_reason(turn: &Turn) -> String {
    let tell = |value: Option<i8>| value.map_or("none".to_owned(), |value| value.to_string());
    let votes = turn.votes.iter().flatten().map(|vote| tell(*vote)).collect::<Vec<_>>().join(", ");
    match (turn.reward_explicit, turn.score) {
        (Some(stated), Some(score)) => {
            format!("stated: {stated}; it beats the judge's score {score}")
        }
        (Some(stated), None) => format!("stated: {stated}"),
        (None, Some(score)) if votes.is_empty() => format!("the judge's score {score}"),
        (None, Some(score)) => format!("the judge's score {score}, of the votes {votes}"),
        (None, None) if turn.judge_error.is_some() => "the judge failed".to_owned(),
        (None, None) if turn.votes.is_some() => "no vote was valid".to_owned(),
        (None, None) => "nobody judged the turn".to_owned(),
    }
}

fn share(turn: &Turn, batch: &Batch) -> Share {
    let tokens = batch.trained(turn).count() as u64;
    let known = tokens > 0 && batch.of != Loss::Nothing && known(turn);
    let part = |some: f64, all: f64| (all > 0.0).then(|| some / all);
    let size = || batch.weight_within(tokens) * sum(turn, f64::abs);
    let loss = || trained(turn).filter_map(|token| contribution(turn, batch, token)).sum();
    Share {
        batch_turns: batch.turns,
        batch_tokens: batch.tokens,
        tokens,
        token_share: part(tokens as f64, batch.tokens as f64),
        reduction: batch.reduction,
        advantage_share: known.then(|| part(size(), batch.size)).flatten(),
        loss: known.then(loss),
        batch_loss: (batch.known && batch.turns > 0).then(|| batch.loss / batch.divisor()),
        loss_part: batch.of,
    }
}

/// Returns what a trained token adds to the loss of the batch, at ratio 1.
fn contribution(turn: &Turn, batch: &Batch, token: usize) -> Option<f64> {
    if batch.of == Loss::Nothing {
        return None;
    }
    let weight = batch.weight_within(trained(turn).count() as u64) / batch.divisor();
    advantage_of(turn, token).map(|advantage| -f64::from(advantage) * weight)
}

fn tokens(turn: &Turn, batch: &Batch, tokenizer: Option<&Tokenizer>) -> Vec<Token> {
    let teacher = chosen(turn)
        .and_then(|place| turn.teacher_log_probs.as_ref()?.get(place)?.as_deref())
        .unwrap_or_default();
    let server = turn.rollout_log_probs.as_deref().unwrap_or_default();
    let mask = turn.loss_mask.as_deref().unwrap_or_default();
    let is_trained: Vec<usize> = batch.trained(turn).collect();
    let token = |(place, id): (usize, &i32)| Token {
        id: *id,
        text: tokenizer.and_then(|tokenizer| tokenizer.decode(&[*id], false).ok()),
        server: server.get(place).copied().flatten(),
        teacher: teacher.get(place).copied(),
        advantage: advantage_of(turn, place),
        mask: mask.get(place).copied(),
        loss: match is_trained.binary_search(&place) {
            Ok(_) => contribution(turn, batch, place),
            // A masked token adds exactly nothing; before `advantage` nothing is known.
            Err(_) => mask.get(place).map(|_| 0.0),
        },
    };
    turn.response_ids.iter().flatten().enumerate().map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(kind: SampleKind, advantages: Option<Vec<f32>>) -> Turn {
        Turn {
            response_ids: Some(vec![5, 6, 2]),
            loss_mask: Some(vec![1, 1, 0]),
            sample_kind: Some(kind),
            advantages,
            ..Turn::default()
        }
    }

    fn told(turn: &Turn, others: &[Turn], of: Loss) -> (Share, Vec<Option<f64>>) {
        let mut batch = Batch::new(ReductionName::Token, of);
        others.iter().chain([turn]).for_each(|turn| batch.add(turn));
        let losses = tokens(turn, &batch, None).iter().map(|token| token.loss).collect();
        (share(turn, &batch), losses)
    }

    #[test]
    fn topk_kl_has_no_loss_of_advantages() {
        // A reward alone is nothing to learn from there.
        let rewarded = turn(SampleKind::Rl, None);
        for advantages in [None, Some(vec![0.0; 3])] {
            let taught = turn(SampleKind::OpdRl, advantages);
            let (share, losses) = told(&taught, std::slice::from_ref(&rewarded), Loss::Nothing);
            assert_eq!((share.batch_turns, share.batch_tokens, share.tokens), (1, 2, 2));
            assert_eq!((share.loss, share.batch_loss, share.advantage_share), (None, None, None));
            assert_eq!(losses, [None, None, Some(0.0)]);
        }
        let (share, losses) = told(&rewarded, &[], Loss::Nothing);
        assert_eq!((share.tokens, share.batch_turns, share.loss), (0, 0, None));
        assert_eq!(losses, [Some(0.0); 3]);
    }

    #[test]
    fn under_other_estimators_it_is_that_of_advantages() {
        for of in [Loss::Whole, Loss::PolicyTerm] {
            let (share, losses) = told(&turn(SampleKind::Opd, Some(vec![0.5; 3])), &[], of);
            assert_eq!((share.loss, share.batch_loss), (Some(-0.5), Some(-0.5)));
            assert_eq!(losses, [Some(-0.25), Some(-0.25), Some(0.0)]);
        }
        for (estimator, of) in [
            (Some("topk-kl"), Loss::Nothing),
            (Some("hybrid"), Loss::PolicyTerm),
            (Some("combine"), Loss::Whole),
            (None, Loss::Whole),
        ] {
            assert_eq!(Loss::of(estimator), of);
        }
    }
}
