//! The figures of the three questions, their bounds, and where these come from.
//! One table: `oclaw stats --bounds` prints it.

use super::{Evidence, Question, Step, Survey, Verdict};

/// On which side of its bounds a figure is bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Small values are bad.
    Below,
    /// Large values are bad.
    Above,
}

impl Side {
    /// Returns the word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Below => "below",
            Self::Above => "above",
        }
    }
}

/// A figure and what is thought of its values.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// The question that it helps to answer.
    pub question: Question,
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub meaning: &'static str,
    /// Where it is bad.
    pub side: Side,
    /// Beyond this it is to be watched.
    pub watch: f64,
    /// Beyond this it is ill; infinite where it never is.
    pub ill: f64,
    /// Whether it can say by itself that all is well.
    pub decides: bool,
    /// Where the bounds come from.
    pub source: &'static str,
    /// What to do.
    pub advice: &'static str,
    pub(super) read: fn(&Evidence<'_>) -> Option<f64>,
}

impl PartialEq for Bound {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Bound {
    /// Returns what a value comes to. A value on a bound is within it.
    pub fn verdict(&self, value: Option<f64>) -> Verdict {
        let Some(value) = value else { return Verdict::Unknown };
        let beyond = |bound: f64| match self.side {
            Side::Below => value < bound,
            Side::Above => value > bound,
        };
        match () {
            () if beyond(self.ill) => Verdict::Ill,
            () if beyond(self.watch) => Verdict::Watch,
            () => Verdict::Healthy,
        }
    }
}

const OURS: &str = "convention of oclaw";

/// Every figure with its bounds.
pub const BOUNDS: &[Bound] = &[
    Bound {
        question: Question::Exploration,
        name: "entropy",
        meaning: "entropy of the policy at the trained tokens in the last step, nats",
        side: Side::Below,
        watch: 0.2,
        ill: 0.05,
        decides: true,
        source: OURS,
        advice: "raise `train --entropy-coef` or the sampling temperature, lower `--lr`",
        read: |evidence| evidence.last(|step| step.entropy),
    },
    Bound {
        question: Question::Exploration,
        name: "surprise",
        meaning: "mean -log-prob of the sampled tokens by the server, greedy answers left out, nats",
        side: Side::Below,
        watch: 0.1,
        ill: 0.02,
        decides: true,
        source: "an estimate of the entropy at temperature 1, less below it: half of its bounds",
        advice: "look at the answers: raise the sampling temperature if they are all alike",
        read: |evidence| evidence.survey.surprise.mean(),
    },
    Bound {
        question: Question::Exploration,
        name: "entropy_kept",
        meaning: "entropy of the last step over that of the first",
        side: Side::Below,
        watch: 0.5,
        ill: 0.1,
        decides: false,
        source: OURS,
        advice: "raise `train --entropy-coef`, lower `--lr`, or go back to an earlier policy",
        read: |evidence| evidence.kept(|step| step.entropy),
    },
    Bound {
        question: Question::Exploration,
        name: "repetition",
        meaning: "mean share of an answer's runs of 4 tokens that stood in it before",
        side: Side::Above,
        watch: 0.2,
        ill: 0.5,
        decides: false,
        source: "seq-rep-4 of Welleck et al. 2019 (arXiv:1908.04319); the bounds are oclaw's",
        advice: "look at the longest answers; an earlier policy may be the better one",
        read: |evidence| evidence.survey.repetition.mean(),
    },
    Bound {
        question: Question::Exploration,
        name: "opening_diversity",
        meaning: "share of answers whose first 4 tokens no earlier answer has, of 8 answers or more",
        side: Side::Below,
        watch: 0.5,
        ill: 0.1,
        decides: false,
        source: OURS,
        advice: "look at how the answers begin; raise the sampling temperature",
        read: |evidence| evidence.survey.opening_diversity(),
    },
    Bound {
        question: Question::Exploration,
        name: "truncated",
        meaning: "share of answers that the token limit ended",
        side: Side::Above,
        watch: 0.1,
        ill: 0.5,
        decides: false,
        source: OURS,
        advice: "raise the clients' `max_tokens`, or reward shorter answers",
        read: |evidence| evidence.survey.truncated_share(),
    },
    Bound {
        question: Question::Exploration,
        name: "length_kept",
        meaning: "trained tokens per turn of the last step over those of the first",
        side: Side::Below,
        watch: 0.5,
        ill: 0.2,
        decides: false,
        source: OURS,
        advice: "look at whether short answers are what the judge rewards",
        read: |evidence| evidence.kept(Step::tokens_per_turn),
    },
    Bound {
        question: Question::Signal,
        name: "advantage_std",
        meaning: "standard deviation of the trained tokens' advantages",
        side: Side::Below,
        watch: 0.1,
        ill: 0.01,
        decides: true,
        source: "the warning of `oclaw advantage` (0.1); a tenth of it is ill",
        advice: "are all rewards equal? look at the judge, add hints, or group by `--group-by`",
        read: |evidence| {
            evidence.advantage(|step| step.advantage_std, |survey| survey.advantages.std())
        },
    },
    Bound {
        question: Question::Signal,
        name: "distill_gap",
        meaning: "mean distance of the hinted teacher from the policy at the taught tokens, nats",
        side: Side::Below,
        watch: 0.01,
        ill: 0.0001,
        decides: true,
        source: OURS,
        advice: "teacher and policy agree: is the hint in the teacher's prompt?",
        read: |evidence| evidence.last(|step| step.distill_gap),
    },
    Bound {
        question: Question::Signal,
        name: "effective_samples",
        meaning: "share of the turns with a next state or stated reward that can be trained",
        side: Side::Below,
        watch: 0.3,
        ill: 0.05,
        decides: true,
        source: OURS,
        advice: "look at the reasons under `no signal`: judge more votes, add hints",
        read: |evidence| evidence.survey.effective_share(),
    },
    Bound {
        question: Question::Signal,
        name: "least_advantage",
        meaning: "the smallest advantage: above 0 nothing is discouraged",
        side: Side::Above,
        watch: 0.0,
        ill: f64::INFINITY,
        decides: false,
        source: "the warning of `oclaw advantage`",
        advice: "nothing is discouraged: does the judge ever say -1? compare within `--group-by`",
        read: |evidence| evidence.advantage(|step| step.advantage_min, Survey::least_advantage),
    },
    Bound {
        question: Question::Signal,
        name: "zero_advantages",
        meaning: "share of the trained tokens' advantages that are exactly 0",
        side: Side::Above,
        watch: 0.5,
        ill: 0.95,
        decides: false,
        source: OURS,
        advice: "most tokens teach nothing: groups of equal rewards, or hints that change nothing",
        read: |evidence| {
            evidence.advantage(|step| step.advantage_zero, |survey| survey.advantages.share_zero())
        },
    },
    Bound {
        question: Question::Signal,
        name: "zero_distillation",
        meaning: "share of the taught tokens where teacher and server agree exactly",
        side: Side::Above,
        watch: 0.5,
        ill: 0.999,
        decides: false,
        source: "the warning of `oclaw advantage` (all of them); half is oclaw's",
        advice: "the teacher is the student, or the hint was lost on the way",
        read: |evidence| evidence.survey.distilled.share_zero(),
    },
    Bound {
        question: Question::Signal,
        name: "hint_coverage",
        meaning: "share of the turns with a next state that have a hint",
        side: Side::Below,
        watch: 0.02,
        ill: f64::NEG_INFINITY,
        decides: false,
        source: OURS,
        advice: "try another prompt for `oclaw hint`, or more calls",
        read: |evidence| evidence.survey.hint_coverage(),
    },
    Bound {
        question: Question::Signal,
        name: "vote_agreement",
        meaning: "mean share of a turn's votes that say what most say, of 2 votes or more",
        side: Side::Below,
        watch: 0.8,
        ill: 0.65,
        decides: false,
        source: "3 votes thrown at random agree to 0.63 on average; 0.8 is oclaw's",
        advice: "the judge guesses: use a better one, or judge by rules",
        read: |evidence| evidence.survey.agreement.mean(),
    },
    Bound {
        question: Question::Signal,
        name: "judge_failures",
        meaning: "share of the judged turns that got no score",
        side: Side::Above,
        watch: 0.05,
        ill: 0.5,
        decides: false,
        source: OURS,
        advice: "look at `judge_error`, then `oclaw judge --fill`",
        read: |evidence| evidence.survey.judge_failures(),
    },
    Bound {
        question: Question::Signal,
        name: "teacher_failures",
        meaning: "share of the hints that got no teacher log-probs",
        side: Side::Above,
        watch: 0.05,
        ill: 0.5,
        decides: false,
        source: OURS,
        advice: "look at `teacher_error`, then `oclaw teacher-lp --fill`",
        read: |evidence| evidence.survey.teacher_failures(),
    },
    Bound {
        question: Question::Signal,
        name: "weights_changed",
        meaning: "share of the weights that are other numbers as they are served",
        side: Side::Below,
        watch: 0.05,
        ill: 0.001,
        decides: false,
        source: "the warning of `oclaw train`",
        advice: "the step is lost in rounding: raise `--lr`, or serve `--dtype f32`",
        read: |evidence| evidence.last(|step| step.weights_changed),
    },
    Bound {
        question: Question::Signal,
        name: "skipped_updates",
        meaning: "updates of all steps that were not finite",
        side: Side::Above,
        watch: 0.0,
        ill: 2.0,
        decides: false,
        source: "three in a row end `oclaw train`",
        advice: "lower `--lr`, and look at the batch with `oclaw lint`",
        read: |evidence| evidence.skipped(),
    },
    Bound {
        question: Question::Drift,
        name: "log_prob_gap",
        meaning: "mean |trainer - server| log-prob in the last step, nats",
        side: Side::Above,
        watch: 0.05,
        ill: 0.1,
        decides: true,
        source: "the warning of `oclaw train` (0.1), which numerics alone do not explain",
        advice: "were the turns sampled by this model at this temperature? is `sync-weights` late?",
        read: |evidence| evidence.last(|step| step.log_prob_gap),
    },
    Bound {
        question: Question::Drift,
        name: "approximate_kl",
        meaning: "size of the mean of lo - lc in the last update",
        side: Side::Above,
        watch: 0.015,
        ill: 0.1,
        decides: false,
        source: "0.015 is where OpenAI's Spinning Up stops the epochs of PPO; 0.1 is oclaw's",
        advice: "lower `--lr` or `--epochs`",
        read: |evidence| evidence.last(|step| step.approximate_kl.map(f64::abs)),
    },
    Bound {
        question: Question::Drift,
        name: "clip_fraction",
        meaning: "share of the tokens where the clip decided in the last update",
        side: Side::Above,
        watch: 0.2,
        ill: 0.5,
        decides: false,
        source: OURS,
        advice: "lower `--lr` or `--epochs`",
        read: |evidence| evidence.last(|step| step.clip_fraction),
    },
    Bound {
        question: Question::Drift,
        name: "staleness",
        meaning: "mean age of the turns' policies in steps: in the last step, else among the turns",
        side: Side::Above,
        watch: 2.0,
        ill: 4.0,
        decides: false,
        source: "4 is the default of `train --max-staleness`; 2 is half of it",
        advice: "sync the weights more often, or train sooner",
        read: |evidence| {
            evidence.last(|step| step.staleness).or_else(|| evidence.survey.staleness())
        },
    },
    Bound {
        question: Question::Drift,
        name: "changed_in_flight",
        meaning: "share of the answers during which the weights changed",
        side: Side::Above,
        watch: 0.1,
        ill: 0.5,
        decides: false,
        source: OURS,
        advice: "sync the weights less often, or when fewer people are chatting",
        read: |evidence| evidence.survey.changed_in_flight(),
    },
    Bound {
        question: Question::Drift,
        name: "without_log_probs",
        meaning: "share of the answers with token ids for which the server gave no log-probs",
        side: Side::Above,
        watch: 0.05,
        ill: 0.5,
        decides: false,
        source: OURS,
        advice: "let the engine return log-probs: nobody can tell how far off policy these are",
        read: |evidence| evidence.survey.without_log_probs(),
    },
];
