//! `oclaw train`.

#[cfg(feature = "torch")]
mod board;
#[cfg(feature = "torch")]
mod checks;
mod compute;
#[cfg(feature = "torch")]
mod follow;
#[cfg(feature = "torch")]
mod given;
#[cfg(feature = "torch")]
mod idle;
#[cfg(feature = "torch")]
mod metrics_file;
#[cfg(feature = "torch")]
mod shelf;
#[cfg(feature = "torch")]
mod silence;
#[cfg(feature = "torch")]
mod steps;
mod terms;
#[cfg(feature = "torch")]
mod window;

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use compute::ComputeArgs;
#[cfg(feature = "torch")]
use oclaw::advantage::Method;
use oclaw::table::{Source, StageLine};

use crate::advantage::{EstimatorName, MethodArgs};
use crate::common::Context;
use crate::files::Inputs;
use crate::follow::{FollowArgs, interval};
use crate::hours::Hours;
use crate::report::Exit;
use crate::units;
use terms::{LossArgs, ScheduleArgs};

/// Make the next policy of a batch of turns.
///
/// Reads what `oclaw advantage` wrote. OUT/step-000007 is a plain Hugging Face
/// folder plus `oclaw/` with the record, the optimiser's state and the ledger of
/// turns, written aside and renamed as one; OUT/latest points to the newest. If
/// there is a `latest`, training resumes there, else it starts from `--model` as
/// step 0. A turn is trained once: one that the ledger has is left out.
///
/// Without `--batch-turns` everything read is one batch and one step. With it,
/// full batches are trained and the rest is reported and stays for another run.
///
/// `--follow FOLDER` takes the turns of shards as they come, in order, and makes a
/// step of every `--batch-turns` (16) that can be trained, or of what there is
/// when the first of them has waited for `--max-wait`. The rest stays for the next
/// step. Turns that the ledger has, trained or refused, are passed over, so that a
/// run that was killed goes on where it was. A shard that cannot be read is tried
/// again, then listed in OUT/failed.jsonl until the next start. The first signal
/// ends the run after the step at hand, with exit code 0; the second at once, and
/// no half policy has a name. `--when-idle` and `--hours` (by this machine's clock)
/// say when a step may begin; meanwhile shards are taken as ever. One that has begun
/// is ended.
///
/// OUT may be a folder of an object store: `train` then works in one of this machine
/// (in `--object-cache`), publishes each policy file by file, its list of files
/// (`oclaw/files.json`) last, and moves `latest`, an object with the policy's name,
/// after that. Another start, here or elsewhere, goes on from the store's `latest`.
/// While the store is away training goes on, and the newest policy is published
/// later. Two trainers for one OUT: the second to finish a step ends with an error.
///
/// Loss per response token: max(-ratio A, -clip(ratio, 1 - low, 1 + high) A), at
/// most -c A for negative A (`--dual-clip c`), ratio = exp(lc - lo); times the
/// importance weight clamp(exp(lo - lb), low, high) of the server's log-probs lb;
/// minus the entropy and plus the KL to the start model, weighted. The advantage
/// is that of `--estimator`, computed with the trainer's own old log-probs lo; if
/// none is given, that of the estimator which the table was made with, or of `hybrid`
/// where the table does not tell; tables that were made with different ones are refused
/// then. Under `--follow` the newest policy in OUT decides, or else the first shard.
///
/// That is PPO's loss (Schulman et al. 2017; separate bounds: DAPO, Yu et al. 2025;
/// dual clip: Ye et al. 2020). `--loss gspo` (Zheng et al. 2025) takes the ratio of
/// the answer, exp(mean (lc - lo)), for each of its tokens; `--loss cispo`
/// (MiniMax-M1, 2025) is -clip(ratio, 1 - low, 1 + high) A lc with the clipped ratio
/// held. `--opsm-delta X` (off-policy sequence masking) drops the tokens of negative
/// advantage of answers whose mean of lo - lc is above X. All three are of the policy
/// term; distillation stays as it is. The ratio is 1 in the first update of a step:
/// none of this clips or drops before `--epochs` or `--mini-batches` make a second.
///
/// The learning rate of update w of `--warmup` W is `--lr` times w / W. From there
/// it stays, or falls (`--schedule`) until update `--total-steps`, whose rate is above
/// 0 and stays from there. Updates are counted with the optimiser's state: a run that
/// goes on goes on there.
///
/// `hybrid` has a second term, top-k distillation. At each token it teaches the
/// ids of `--subset` (the student's top-k, the teacher's, or those in both) by
/// the hint that `--hint-selection` chooses: the one whose top-k overlaps the
/// student's most over the answer (`sequence`) or at the token, or the shortest.
/// With w = the old policy's probabilities over those ids, scaled to 1, and d =
/// clip(lt - lo, -C, C), C = `--distill-clip`: the sum over ids of the same loss
/// as above with A = w d. What the policy hardly ever says has hardly any w, however
/// much the teacher wants it: `--distill-weights teacher` takes the teacher's. The
/// terms are weighed by `--w-rl` and `--w-opd`. A turn without a hint has no such
/// term, a hint with a value that is not finite none at that token. The columns come from `oclaw teacher-lp --topk 4`; a table whose
/// hints all lack them is refused.
///
/// `topk-kl` (SDFT, Shenfeld et al. 2026; SDPO, Hübotter et al. 2026) has no policy
/// term: its loss is `--w-opd` times the KL of the policy from the teacher, over the
/// top-k ids of the first usable hint and one bin for all other ids: sum of p (log p -
/// log t), with the log of the bin log(1 - exp(min(s, -1e-7))), s = logsumexp of the k
/// log-probs. Both are at the teacher's temperature. Turns without a hint are not
/// trained, nothing is clipped, and there are no advantages to tell of. Flags of what is
/// not there are refused; elsewhere a flag that does nothing is told of.
///
/// The reward part of an advantage is read from `rl_advantages`: `rloo`,
/// `reinforce++`, `reinforce++-baseline` and `gae` train tables that `oclaw
/// advantage` made with the same `--estimator`. Under `reinforce++` the advantages
/// of a step are whitened over its trained tokens.
///
/// Not trained, and counted by reason: rows without a signal, broken rows (exit
/// code 3 tells), rows of a policy older than `--max-staleness` steps, of a later
/// one or of none known, rows whose sampling temperature nobody knows. Broken are
/// lists of different length, log-probs above 0, rewards beyond -1 to 1, advantages
/// above 1e6 in size, temperatures below 1e-4 (0 is greedy), numbers that are none,
/// masks other than 0 and 1, and a mask of 1 where an answer failed, was aborted,
/// has no ids of its server or is marked untrainable. A loss or gradient that is
/// not finite skips its update (exit code 3); three in a row end the run. The turns of a
/// part (`--mini-batches`) that had no other update are not in the ledger.
///
/// No broken policy is published. After a step the weights must be finite, and on
/// the first sequences of the batch (whole ones, up to 2048 tokens, at least one)
/// the log-probs of the trained answer tokens, and those of the prompts, must be
/// finite and have fallen by at most 5 nats on average (what rises does not make up
/// for it). Else the run ends with exit code 1 and the figure, and `latest` stays:
/// lower `--lr`. A run that comes to no policy takes OUT away again if it made it,
/// and a metrics file that it made and wrote no step to; one that is killed cannot.
///
/// `--lora-rank R` trains adapters (LoRA) and leaves the weights of `--model` as they
/// are. A policy is then the model with the adapters added, which every server
/// loads, and `adapter/` in it is a folder of the `peft` library: the adapters alone,
/// f32, from which training goes on. `oclaw convert --merge` adds such a folder to its
/// model. `--lora-targets` names some of q_proj, k_proj, v_proj, o_proj, gate_proj,
/// up_proj, down_proj. `--train-dtype bf16` computes the products in bf16; weights,
/// gradients and the optimiser's state stay f32, so that no small step is lost, and
/// `--dtype` rounds what is written. It is quick where the processor or device has
/// bf16 products, and no quicker than f32 elsewhere.
///
/// A policy in bf16 is rounded from those f32 weights, which stay in the optimiser's
/// state: training goes on from them, never from what was rounded. `--save-rounding
/// stochastic` (Gupta et al. 2015) draws by `--seed`, step and name of the tensor, so that
/// a run that goes on writes the same bits. `nearest` leaves most weights as they were if
/// steps are small, and the server does not see them. `weights_changed` counts what is
/// written, and with it what chance alone moves.
///
/// `--ema D` keeps a moving average beside the policy, a slow teacher: average = D
/// average + (1 - D) weights after every update, from the start model on. It is a whole
/// model in f32, the folder `ema/` in each policy's own (under `--lora-rank` the average
/// of the adapters, in `ema/adapter`, added to the model), is published with the policy
/// and goes on with it to the bit: `oclaw teacher-lp --model OUT/latest/ema`.
///
/// Metrics (`--metrics FILE`, one JSON object per step; null is not known):
/// `step`, `turns`, `tokens` (trained), `input_tokens` (through the model),
/// `loss`, `policy_loss`, `distill_loss`, `reference_kl`, `entropy` (before the first update;
/// nats), `clip_fraction`, `opsm_dropped` (share of tokens), `approximate_kl` (mean
/// lo - lc; all three of the last update),
/// `log_prob_gap` (mean |trainer - server|), `importance` (mean weight),
/// `gradient_norm` (before clipping), `clip_coefficient`, `moved` (mean |new - old|
/// log-prob of the answers looked at), `learning_rate` (last update),
/// `weights_changed` (share of weights that are other numbers in the type they
/// are served in; of the adapters' under LoRA), `reward`, `advantage_mean`, `_std`, `_min`, `_max`, `_zero`
/// (share of exact zeros), `distill_clip_fraction` (of taught ids, last update),
/// `distill_gap` (mean sum of w |d|), `subset_size` and `overlap` (mean ids taught,
/// and shared with the student), `unusable` (tokens), `staleness`, `staleness_max`, `refused` (by reason, of
/// this run), `skipped_updates`, `seconds`. With `--mini-batches` an update is of a
/// part of the batch. `--tensorboard DIR` writes the same as scalars `train/KEY` and
/// `refused/REASON`, a file for each run; what is not known is left out.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[cfg(feature = "torch")]
    #[command(flatten)]
    given: given::Given,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    following: FollowArgs,
    /// How signals become advantages [default: that of the table, or `hybrid`]
    #[arg(long, value_enum, value_name = "NAME")]
    estimator: Option<EstimatorName>,
    #[command(flatten)]
    method: MethodArgs,
    /// Folder of the start model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Folder of the policies, of this machine or s3://…
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    /// Turns per step [default: all; 16 with --follow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    batch_turns: Option<u64>,
    /// How long the first turn of a step waits for the others; 0 for not at all [default: for ever]
    #[arg(long, value_name = "TIME", value_parser = units::duration, requires = "follow")]
    max_wait: Option<Duration>,
    #[command(flatten)]
    window: WindowArgs,
    /// How often each batch is gone through, its old log-probs held
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Equal parts that a batch is cut into, in order, each with an update of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    mini_batches: u32,
    #[command(flatten)]
    loss: LossArgs,
    #[command(flatten)]
    distillation: DistillationArgs,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    #[command(flatten)]
    schedule: ScheduleArgs,
    /// Whose log-probs stand for the old policy's
    #[arg(long, value_enum, value_name = "WHOSE", default_value_t = OldName::Recompute)]
    old_log_probs: OldName,
    /// Oldest policy, in steps, whose rows are trained
    #[arg(long, value_name = "STEPS", default_value_t = 4)]
    max_staleness: u64,
    /// Step that a foreign weight version stands for; `none=0` for rows without one
    #[arg(long, value_name = "NAME=STEP", value_parser = alias)]
    version_alias: Vec<(String, u64)>,
    /// Temperature of log-probs where the row does not tell
    #[arg(long, value_name = "T", value_parser = positive)]
    assume_temperature: Option<f64>,
    /// Type of the weights written [default: f32 below a billion weights, else the base's]
    #[arg(long, value_enum, value_name = "TYPE")]
    dtype: Option<DtypeName>,
    /// How weights become bf16, where that is what is written [default: stochastic; nearest with --lora-rank]
    #[arg(long, value_enum, value_name = "HOW")]
    save_rounding: Option<RoundingName>,
    /// Tokens that go through the model at once; more need more memory
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    tokens_per_pass: u64,
    /// Policies kept; the two newest keep their optimiser's state
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    keep: u64,
    /// Append one JSON object per step to this file
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Write the same numbers as TensorBoard's event files into this folder
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
    #[command(flatten)]
    compute: ComputeArgs,
}

/// When steps are made, under `--follow`.
#[derive(clap::Args, Debug)]
struct WindowArgs {
    /// Begin a step only when nobody has chatted for so long, as --spool tells
    #[arg(long, value_name = "TIME", value_parser = interval, requires = "follow", requires = "spool")]
    when_idle: Option<Duration>,
    /// Spool of the `oclaw serve` whose chats come first
    #[arg(long, value_name = "DIR", requires = "when_idle")]
    spool: Option<PathBuf>,
    /// Begin a step only in these hours, as in `22:00-06:00`; may be given several times
    #[arg(long, value_name = "FROM-TO", value_parser = Hours::parse, requires = "follow")]
    hours: Vec<Hours>,
}

/// Top-k distillation, the second term of `hybrid`.
#[derive(clap::Args, Debug)]
struct DistillationArgs {
    /// Which hint teaches a token, under `hybrid`
    #[arg(long, value_enum, value_name = "HOW", default_value_t = SelectionName::Sequence)]
    hint_selection: SelectionName,
    /// Which ids it teaches, under `hybrid`
    #[arg(long, value_enum, value_name = "IDS", default_value_t = SubsetName::Student)]
    subset: SubsetName,
    /// Whose probabilities weigh them, under `hybrid`
    #[arg(long, value_enum, value_name = "WHOSE", default_value_t = WeightsName::Policy)]
    distill_weights: WeightsName,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum SelectionName {
    /// The one with the largest overlap over the answer
    Sequence,
    /// The one with the largest overlap at the token
    Token,
    /// The first
    Shortest,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum SubsetName {
    /// The student's likeliest
    Student,
    /// The hinted teacher's likeliest
    Teacher,
    /// Those in both
    Overlap,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum WeightsName {
    /// The old policy's, as in reverse KL
    Policy,
    /// The hinted teacher's, as in forward KL: also what the policy hardly ever says is taught
    Teacher,
}

/// The optimiser's constants.
#[derive(clap::Args, Debug)]
struct OptimizerArgs {
    /// Learning rate, at most 1 [default: 1e-5; 1e-4 with --lora-rank]
    #[arg(long, value_name = "X", value_parser = share)]
    lr: Option<f64>,
    /// Weight decay
    #[arg(long, value_name = "X", default_value_t = 0.1, value_parser = not_negative)]
    weight_decay: f64,
    /// Let norms and biases decay too
    #[arg(long)]
    decay_all: bool,
    /// Largest norm of the gradient
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive)]
    clip_norm: f64,
    /// Keep a moving average of the policies too: what it keeps of itself at an update
    #[arg(long, value_name = "DECAY", value_parser = decay)]
    ema: Option<f64>,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum OldName {
    /// The trainer's, by a forward pass before the step
    Recompute,
    /// The server's
    Rollout,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum DtypeName {
    /// 32-bit floats
    F32,
    /// 16-bit floats with the exponent of f32
    Bf16,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum RoundingName {
    /// To the nearer of the two neighbours
    Nearest,
    /// Up or down by chance, the nearer the likelier, so that small steps are not lost
    Stochastic,
}

fn number(text: &str, wanted: &str, fits: fn(f64) -> bool) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if fits(value) => Ok(value),
        _ => Err(format!("wanted {wanted}")),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number, 0 or more", |value| value.is_finite() && value >= 0.0)
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0", |value| value.is_finite() && value > 0.0)
}

fn share(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to 1", |value| (0.0..=1.0).contains(&value))
}

fn decay(text: &str) -> Result<f64, String> {
    number(text, "a number above 0 and below 1", |value| value > 0.0 && value < 1.0)
}

fn dual(text: &str) -> Result<f64, String> {
    number(text, "0, or a number above 1", |value| value == 0.0 || value > 1.0)
}

fn alias(text: &str) -> Result<(String, u64), String> {
    let parts = text.split_once('=');
    let parsed = parts.and_then(|(name, step)| Some((name.to_owned(), step.parse().ok()?)));
    parsed.ok_or_else(|| "wanted NAME=STEP, as in `default=0`".to_owned())
}

/// Returns the estimator that a table was made with, if it tells; of several inputs, what the
/// first that tells does.
pub(crate) fn stated_estimator(source: &Source) -> Option<&str> {
    stated_estimators(source).into_iter().find_map(|(_, stated)| stated)
}

/// Returns what the inputs tell of the estimator that they were made with: each answer once,
/// with the name of the first input that gives it.
fn stated_estimators(source: &Source) -> Vec<(&str, Option<&str>)> {
    let mut found: Vec<(&str, Option<&str>)> = Vec::new();
    for (name, stages) in source.stages() {
        let stated = estimator_of(stages);
        if found.iter().all(|(_, known)| *known != stated) {
            found.push((name, stated));
        }
    }
    found
}

/// Returns the estimator that an input was made with, if it tells: by the command line of
/// its last `advantage`, in which the last one counts.
fn estimator_of(stages: &[StageLine]) -> Option<&str> {
    let made = stages.iter().rev().find(|line| line.command == "advantage")?;
    let mut found = None;
    for (place, word) in made.argv.iter().enumerate() {
        match word.strip_prefix("--estimator") {
            Some("") => found = made.argv.get(place + 1).map(String::as_str),
            Some(rest) => found = rest.strip_prefix('=').or(found),
            None => {}
        }
    }
    found
}

#[cfg(feature = "torch")]
impl Args {
    /// Returns the estimator that was given, else the one that made the table, with its
    /// numbers.
    fn method_for(&self, source: &Source) -> Method {
        let stated = || EstimatorName::from_str(stated_estimator(source)?, false).ok();
        self.method.method_of(self.estimator.or_else(stated).unwrap_or_default())
    }
}

/// Trains.
#[cfg(feature = "torch")]
pub(crate) fn run(mut args: Args, context: &Context) -> anyhow::Result<Exit> {
    let Some(mut shelf) = shelf::Shelf::open(&args, context)? else { return Ok(Exit::Done) };
    args.out = shelf.folder().to_owned();
    let exit = steps::run(&args, &mut shelf, context)?;
    shelf.close(context)?;
    Ok(exit)
}

/// Says what this build lacks.
#[cfg(not(feature = "torch"))]
pub(crate) fn run(_: Args, _: &Context) -> anyhow::Result<Exit> {
    Err(crate::common::needs_torch("`oclaw train`"))
}
