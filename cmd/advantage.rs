//! `oclaw advantage`.

mod compare;
mod looked;
mod peers;
mod told;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use clap::ValueEnum;
use comfy_table::Table;
use oclaw::advantage::{self, Estimator, Method, Standing, Summary};
use oclaw::stage::{self, Output, Rules, Tally};
use oclaw::table::{Source, StageLine};
use oclaw::trajectory::words::SampleKind;
use oclaw::trajectory::{Turn, Writer};

use crate::asking;
use crate::common::Context;
use crate::files::Files;
use crate::follow::Counting;
use crate::progress;
use crate::report::{Exit, Failure};
use crate::visible::visible;
use looked::Looked;
use peers::{PeerArgs, Peers};
use told::{Heard, Told, ToldArgs};

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
/// A = w_opd (lt - lo) + w_rl r, where a row without a hint has no first term;
/// `hybrid` (the default) A = r, beside which `train` has a loss of its own for the
/// hints, by the columns of `oclaw teacher-lp --topk`; `topk-kl` has such a loss
/// alone, and no A. `train` takes the table's estimator unless it is told another.
/// Here lo is the server's log-prob. `train` computes its own and so its own
/// advantages; a row in which the server left out a log-prob has no `advantages`
/// here and can be trained all the same.
///
/// r is the reward, or with `--group-by` what it comes to in its group: (r - mean)
/// / (std + 1e-6), std unbiased; under `rloo` r less the mean of the others; under
/// `reinforce++-baseline` r - mean. A group of one, or of equal rewards, gives 0.
/// `reinforce++` discounts r backwards from the last token by `--gamma`. `gae`
/// runs over the turns of a line of conversation: d_t = r_t + gamma V_t+1 - V_t,
/// A_t = d_t + gamma lambda A_t+1, where a turn without a reward has 0 and V is 0
/// or `--value-column`. `rl_advantages` holds this part; `train` reads it there.
/// Rows without a signal of their own count in their group and session; they are
/// not trained.
///
/// `--shape judged=0.7,outcome=0.3` makes the reward a sum: what there is of each
/// source, times its weight; a source that is null adds nothing. Weights add up to 1
/// at most, so rewards stay between -1 and 1. The outcome of a session is what was
/// stated of the turn that ends it (or that row's value of `--outcome-column`) and
/// counts for each of its turns. `reward_source` is then `mixed`, unless a single
/// source has its say at full weight, or only the outcome has.
///
/// `--feedback FOLDER` (of a spool, `feedback`) joins what `/v1/feedback` took in after
/// the turn's row was written: `reward_explicit` and `feedback_text` get the latest
/// word, by turn id, by session and number, or for the latest turn of the session.
/// What is about no row is counted at the end: under `--follow`, of no shard that was
/// noted in this run.
///
/// At least one: the first turn of a session that is judged 0, while no earlier
/// turn of that session had any signal, is promoted. With a hint it teaches even
/// under `grpo`; without one it is counted as `promoted_without_signal`. Under
/// `--shape` it is one that the judge has a say in and judged 0, and whose sum is 0.
///
/// `--follow FOLDER -o OUT` notes each shard as it comes, as in `oclaw judge`.
/// Groups, the lines of `gae`, outcomes and the sessions of at-least-one end at the
/// shard's edge: a session of two shards may have a turn promoted in each.
///
/// `--compare grpo,opd,combine` writes no table: it prints, a column per estimator,
/// the rows and tokens it can use, the size of its advantages, the share of lt - lo
/// that its limit cut, and for each two of them the share of tokens that both push
/// the same way. `--format csv` and `--format json` print it for programs.
///
/// A row that contradicts itself (lists of different length, numbers that are
/// none, log-probs above 0, a reward beyond -1 to 1) gets an `advantage_error`; the
/// others go on and the exit code is 3. If of several hints one has such log-probs
/// and a later one has none, the later one teaches, and `sample_reason` tells.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    /// How signals become advantages
    #[arg(long, value_enum, value_name = "NAME", default_value_t)]
    estimator: EstimatorName,
    #[command(flatten)]
    method: MethodArgs,
    #[command(flatten)]
    peers: PeerArgs,
    #[command(flatten)]
    told: ToldArgs,
    /// Promote the first neutral turn of a session that has no signal yet
    #[arg(long, value_enum, value_name = "ON|OFF", default_value_t = Switch::On)]
    at_least_one: Switch,
    /// Print what these estimators make of the table, side by side, and write none
    #[arg(
        long,
        value_enum,
        value_name = "NAME,NAME",
        value_delimiter = ',',
        conflicts_with = "estimator"
    )]
    compare: Vec<EstimatorName>,
}

/// The numbers of an estimator, equal in `advantage` and `train`.
#[derive(clap::Args, Debug)]
pub(crate) struct MethodArgs {
    /// Weight of the reward in `combine` and `hybrid`
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    w_rl: f32,
    /// Weight of the teacher in `combine`, `hybrid` and `topk-kl`
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    w_opd: f32,
    /// Limit on the size of lt - lo; 0 is none [default: none; 1 for `hybrid`]
    #[arg(long, value_name = "X")]
    distill_clip: Option<f32>,
}

impl MethodArgs {
    /// Returns an estimator with these numbers.
    pub(crate) fn method_of(&self, estimator: EstimatorName) -> Method {
        Method {
            reward_weight: self.w_rl,
            distill_weight: self.w_opd,
            // 0 and below mean no limit, as everywhere in the field.
            distill_clip: self
                .distill_clip
                .or((estimator == EstimatorName::Hybrid).then_some(1.0))
                .filter(|limit| *limit > 0.0),
            ..Method::new(estimator.into())
        }
    }
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EstimatorName {
    /// The reward on every token
    Grpo,
    /// The reward less the mean of the others in the group
    Rloo,
    /// The reward at the last token, discounted backwards
    #[value(name = "reinforce++")]
    ReinforcePlusPlus,
    /// The reward less the mean of the group
    #[value(name = "reinforce++-baseline")]
    ReinforcePlusPlusBaseline,
    /// Rewards of later turns count for earlier ones
    Gae,
    /// Distillation towards the hinted teacher
    Opd,
    /// Reward and teacher added, weighted
    Combine,
    /// Reward and top-k distillation, two terms of the loss
    #[default]
    Hybrid,
    /// KL from the teacher over its top-k and the rest (SDFT, SDPO)
    TopkKl,
}

impl From<EstimatorName> for Estimator {
    fn from(name: EstimatorName) -> Self {
        match name {
            EstimatorName::Grpo => Self::Grpo,
            EstimatorName::Rloo => Self::Rloo,
            EstimatorName::ReinforcePlusPlus => Self::ReinforcePlusPlus,
            EstimatorName::ReinforcePlusPlusBaseline => Self::ReinforcePlusPlusBaseline,
            EstimatorName::Gae => Self::Gae,
            EstimatorName::Opd => Self::Opd,
            EstimatorName::Combine => Self::Combine,
            EstimatorName::Hybrid => Self::Hybrid,
            EstimatorName::TopkKl => Self::TopkKl,
        }
    }
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    On,
    Off,
}

/// Notes a table.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if !args.compare.is_empty() {
        return compare::run(&args, &args.compare, context);
    }
    let method = method(&args)?;
    let (summary, heard) = (RefCell::new(Summary::default()), RefCell::new(Heard::default()));
    if let Some(route) = args.files.route(context)? {
        let shard = async |source, output: &Output| {
            let counting = Counting::start(&summary);
            let tally = note(&args, context, source, (output, &summary, &heard))?;
            Ok(counting.settle(tally, |it| it.rows - it.of_kind(SampleKind::None)))
        };
        let followed = context.block_on(route.run(shard, || false))?;
        // What is about no row of one shard may be about a row of another.
        let strangers = heard.into_inner().strangers();
        let summary = Summary { strangers, ..summary.into_inner() };
        let table = table(&summary, &followed.tally, method.estimator);
        let exit = route.conclude(followed, table)?;
        warn(&summary, context);
        return Ok(exit);
    }
    let source = args.files.open(context)?;
    let tally = note(&args, context, source, (&args.files.output(), &summary, &heard))?;
    let strangers = heard.into_inner().strangers();
    let summary = Summary { strangers, ..summary.into_inner() };
    context.conclude(table(&summary, &tally, method.estimator));
    warn(&summary, context);
    Ok(if tally.failed > 0 { Exit::Partial } else { Exit::Done })
}

fn warn(summary: &Summary, context: &Context) {
    for warning in summary.warnings() {
        context.say(format!("warning: {warning}"));
    }
}

/// Notes one table.
fn note(
    args: &Args,
    context: &Context,
    mut source: Source,
    (output, summary, heard): (&Output, &RefCell<Summary>, &RefCell<Heard>),
) -> anyhow::Result<Tally> {
    let method = method(args)?;
    let mut plan = args.files.plan(context, Writer::Advantage, &source)?;
    if let Some(line) = &mut plan.line {
        state_estimator(line, method.estimator);
    }
    (plan.reads, plan.peeks) = (looked::READS, looked::PEEKS);
    // Of a prompt is only asked whether there is one, of ids that are none below 0.
    plan.trusts_prompts = true;
    plan.mends = args.told.mends();
    plan.needs = needs(method.estimator, &args.told);
    let needs_score =
        method.estimator.reads_rewards() && !args.told.spares_judge() && !is_judged(&source);
    let group_by = args.peers.group_by.as_deref();
    let peers = Peers::read(&mut source, group_by, args.peers.value_column.as_deref())?;
    let told = Told::read(&args.told, &mut source)?;
    let bar = progress::bar(context, "advantage", source.total_rows());
    let grouped = group_by.is_some() || method.estimator == Estimator::Gae;
    let signals_of = |turn: &Turn| {
        let shaped = told.shaped(turn);
        (advantage::resolve_shaped(turn, shaped), shaped)
    };
    let look = |mut turn: Turn| {
        told.join(&mut turn);
        let (signals, shaped) = signals_of(&turn);
        Looked::of(&turn, signals.as_ref().ok(), (shaped, grouped))
    };
    let decide = |looked: Vec<Looked>| {
        if needs_score && !looked.iter().any(|row| row.stated) {
            return Err(stage::Error::ColumnMissing { column: "score", stage: "judge" });
        }
        let (outcomes, members) = looked::split(looked, &peers);
        let promoted = match args.at_least_one {
            Switch::On => advantage::promoted(&outcomes),
            Switch::Off => HashSet::new(),
        };
        Ok((promoted, advantage::shares(&method, &members)))
    };
    let note = |turn: &mut Turn, (promoted, shares): &Decided, counts: &mut Summary| {
        counts.joined += u64::from(told.join(turn));
        let (signals, shaped) = signals_of(turn);
        let looked = Looked::of(turn, signals.as_ref().ok(), (shaped, grouped));
        let promoted = promoted.contains(&turn.turn_id);
        let share = shares.get(&turn.turn_id).copied();
        let standing = Standing { promoted, share, shaped };
        advantage::note_signals(turn, signals, standing, &method);
        counts.add(turn, &method);
        looked
    };
    let rules = Rules {
        suppose: |turn| look(looked::supposed(turn)),
        look: &look,
        decide,
        note,
        merge: Summary::merge,
    };
    let mut watch = |tally: &Tally| bar.set_position(tally.rows);
    let done = stage::regroup(source, output, &plan, rules, &mut watch);
    bar.finish_and_clear();
    let (done, counts) = done?;
    summary.borrow_mut().merge(counts);
    heard.borrow_mut().add(&told);
    Ok(done)
}

/// What all rows together decide: the ids of promoted turns, and what the reward of a
/// turn comes to, by its id.
type Decided = (HashSet<String>, HashMap<String, f32>);

/// Returns the columns that must be there. What somebody stated may spare the judge, but
/// not where the judge's word is a part of the sum.
fn needs(estimator: Estimator, told: &ToldArgs) -> &'static [&'static str] {
    match (told.weighs_judge(), estimator.reads_teacher()) {
        (true, true) => &["score", "hints", "teacher_log_probs"],
        (true, false) => &["score"],
        (false, true) => &["hints", "teacher_log_probs"],
        (false, false) => &[],
    }
}

fn method(args: &Args) -> Result<Method, Failure> {
    let mut method = args.method.method_of(args.estimator);
    args.peers.check(method.estimator, args.files.fill)?;
    args.told.check(args.files.fill)?;
    method.gamma = args.peers.gamma.unwrap_or(method.gamma);
    method.lambda = args.peers.lambda.unwrap_or(method.lambda);
    Ok(method)
}

fn is_judged(source: &Source) -> bool {
    source.schema().index_of("score").is_ok()
}

/// The estimator may come from the environment, a file or nowhere: `train` looks
/// for it in the line.
fn state_estimator(line: &mut StageLine, estimator: Estimator) {
    let stated = |word: &String| word == "--estimator" || word.starts_with("--estimator=");
    if !line.argv.iter().any(stated) {
        line.argv.push(format!("--estimator={estimator}"));
    }
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
    if summary.joined > 0 {
        row("  with late feedback".to_owned(), summary.joined.to_string());
    }
    if summary.strangers > 0 {
        row("feedback for no row here".to_owned(), summary.strangers.to_string());
    }
    for (reason, count) in &summary.reasons {
        row(format!("no signal: {}", visible(reason)), count.to_string());
    }
    if summary.passed_over > 0 {
        row("taught by another candidate".to_owned(), summary.passed_over.to_string());
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
