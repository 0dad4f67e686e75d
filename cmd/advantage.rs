//! `oclaw advantage`.

use std::cell::RefCell;
use std::collections::HashSet;

use clap::ValueEnum;
use comfy_table::Table;
use oclaw::advantage::{self, Estimator, Method, Summary};
use oclaw::stage::{self, Tally};
use oclaw::trajectory::{Turn, Writer};

use crate::asking;
use crate::common::Context;
use crate::files::Files;
use crate::progress;
use crate::report::Exit;

/// Turn rewards and hints into a training signal.
///
/// A row's reward is `reward_explicit`, else the judge's `score`. With a usable
/// hint (teacher log-probs for every response token) and a reward that is not 0
/// it is of kind `opd+rl`; with the hint only `opd`; with the reward only `rl`;
/// with neither `none`: kept, masked, its reason recorded. Fills `reward`,
/// `reward_source`, `sample_kind`, `sample_reason`, `promoted`, `loss_mask`,
/// `rl_advantages`, `advantages` and `advantage_error`.
///
/// Estimators, per response token t: `grpo` A = r; `opd` A = lt - lo; `combine`
/// A = w_opd (lt - lo) + w_rl r, where a row without a hint has no first term.
/// Here lo is the server's log-prob. `train` computes its own and so its own
/// advantages, with any estimator; a row in which the server left out a log-prob
/// has no `advantages` here and can be trained all the same.
///
/// At least one: the first turn of a session that is judged 0, while no earlier
/// turn of that session had any signal, is promoted. With a hint it teaches even
/// under `grpo`; without one it is counted as `promoted_without_signal`.
///
/// A row that contradicts itself (lists of different length, numbers that are
/// none) gets an `advantage_error`; the others go on and the exit code is 3.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    method: MethodArgs,
    /// Promote the first neutral turn of a session that has no signal yet
    #[arg(long, value_enum, value_name = "ON|OFF", default_value_t = Switch::On)]
    at_least_one: Switch,
}

/// The estimator and its numbers, equal in `advantage` and `train`.
#[derive(clap::Args, Debug)]
pub(crate) struct MethodArgs {
    /// How signals become advantages
    #[arg(long, value_enum, value_name = "NAME", default_value_t = EstimatorName::Combine)]
    pub(crate) estimator: EstimatorName,
    /// Weight of the reward in `combine`
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    w_rl: f32,
    /// Weight of the teacher in `combine`
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    w_opd: f32,
    /// Limit on the size of lt - lo [default: none]
    #[arg(long, value_name = "X")]
    distill_clip: Option<f32>,
}

impl MethodArgs {
    /// Returns the estimator with its numbers.
    pub(crate) fn method(&self) -> Method {
        Method {
            estimator: match self.estimator {
                EstimatorName::Grpo => Estimator::Grpo,
                EstimatorName::Opd => Estimator::Opd,
                EstimatorName::Combine => Estimator::Combine,
            },
            reward_weight: self.w_rl,
            distill_weight: self.w_opd,
            // 0 and below mean no limit, as everywhere in the field.
            distill_clip: self.distill_clip.filter(|limit| *limit > 0.0),
        }
    }
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EstimatorName {
    /// The reward on every token
    Grpo,
    /// Distillation towards the hinted teacher
    Opd,
    /// Both, weighted
    Combine,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    On,
    Off,
}

/// Notes a table.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let method = args.method.method();
    let source = args.files.open()?;
    let mut plan = args.files.plan(context, Writer::Advantage, &source)?;
    if method.estimator.reads_teacher() {
        plan.needs = &["hints", "teacher_log_probs"];
    }
    let judged = source.schema().index_of("score").is_ok();
    let needs_score = method.estimator.reads_rewards() && !judged;
    let bar = progress::bar(context, "advantage", source.total_rows());
    let summary = RefCell::new(Summary::default());
    let survey = |turns: &mut dyn Iterator<Item = Result<Turn, stage::Error>>| {
        let (mut outcomes, mut stated) = (Vec::new(), false);
        for turn in turns {
            let turn = turn?;
            stated |= turn.reward_explicit.is_some();
            outcomes.push(advantage::outcome(&turn));
        }
        if needs_score && !stated {
            return Err(stage::Error::ColumnMissing { column: "score", stage: "judge" });
        }
        let promoted = match args.at_least_one {
            Switch::On => advantage::promoted(&outcomes),
            Switch::Off => HashSet::new(),
        };
        let (method, summary) = (&method, &summary);
        Ok(move |turn: Turn| {
            let kept = promoted.contains(&turn.turn_id);
            let turn = advantage::note(turn, kept, method);
            summary.borrow_mut().add(&turn, method);
            turn
        })
    };
    let watch = |tally: &Tally| bar.set_position(tally.rows);
    let done = stage::regroup(source, &args.files.output(), &plan, survey, &watch);
    bar.finish_and_clear();
    let tally = done?;
    let summary = summary.into_inner();
    context.say(table(&summary, &tally, method.estimator));
    for warning in summary.warnings() {
        context.say(format!("warning: {warning}"));
    }
    Ok(if tally.failed > 0 { Exit::Partial } else { Exit::Done })
}

fn table(summary: &Summary, tally: &Tally, estimator: Estimator) -> Table {
    let mut table = asking::closing_table();
    let mut row = |name: String, value: String| {
        table.add_row([name, value]);
    };
    row("turns".to_owned(), tally.rows.to_string());
    if tally.kept > 0 {
        row("  noted before".to_owned(), tally.kept.to_string());
    }
    for (kind, count) in summary.kinds() {
        row(format!("  {kind}"), count.to_string());
    }
    row("  promoted".to_owned(), summary.promoted.to_string());
    row("  refused".to_owned(), summary.refused.to_string());
    for (reason, count) in &summary.reasons {
        row(format!("no signal: {reason}"), count.to_string());
    }
    row("trainable tokens".to_owned(), summary.tokens.to_string());
    if summary.without_log_probs > 0 {
        let count = summary.without_log_probs;
        row("rows that need train's log-probs".to_owned(), count.to_string());
    }
    let spread = &summary.advantages;
    if let (Some(mean), Some(std), Some(zero)) = (spread.mean(), spread.std(), spread.share_zero())
    {
        row(format!("{estimator} mean"), format!("{mean:.4}"));
        row("  std".to_owned(), format!("{std:.4}"));
        row("  min".to_owned(), format!("{:.4}", spread.min));
        row("  max".to_owned(), format!("{:.4}", spread.max));
        row("  share of zero".to_owned(), format!("{zero:.4}"));
    }
    if let (Some(mean), Some(std)) = (summary.distilled.mean(), summary.distilled.std()) {
        row("teacher - policy mean".to_owned(), format!("{mean:.4}"));
        row("  std".to_owned(), format!("{std:.4}"));
    }
    table
}
