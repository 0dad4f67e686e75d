//! From flags to steps: the part of `oclaw train` that needs libtorch.

use std::collections::{BTreeMap, VecDeque};

use comfy_table::Table;
use indicatif::ProgressBar;
use oclaw::advantage::Method;
use oclaw::health::{self, Answer, Evidence, Step, Survey};
use oclaw::loss::{DistillWeights, HintSelection, SubsetIds};
use oclaw::model::Dtype;
use oclaw::train::{
    Admission, Distillation, Fault, OldLogProbs, Options, Rates, Rounding, Trained, Trainer,
};
use oclaw::trajectory::Turn;

use super::checks;
use super::follow;
use super::idle;
use super::metrics_file::Records;
use super::shelf::Shelf;
use super::silence;
use super::{
    Args, DistillationArgs, DtypeName, OldName, RoundingName, SelectionName, SubsetName,
    WeightsName,
};
use crate::asking;
use crate::common::Context;
use crate::health_lines;
use crate::progress;
use crate::report::{Exit, Failure};
use crate::visible::visible;

/// Mean |trainer - server| log-prob, in nats, that numerics alone do not explain.
const WIDE_GAP: f64 = 0.1;

/// Broken rows named one by one; of the others only the count is told.
pub(super) const NAMED: usize = 10;

/// Share of changed weights below which most of a step is lost in rounding.
const TINY_CHANGE: f64 = 0.05;

pub(super) fn run(args: &Args, shelf: &mut Shelf, context: &Context) -> anyhow::Result<Exit> {
    args.loss.check()?;
    args.schedule.check()?;
    idle::check_rounding(args)?;
    // What is not given the table tells.
    if let Some(estimator) = args.estimator {
        idle::tell(args, estimator.into(), &mut |text| context.say(text))?;
    }
    if let Some(folder) = args.following.folder()? {
        return follow::run(args, shelf, context, folder);
    }
    let mut source = args.inputs.open(context)?;
    let method = checks::choose(&source, args, &mut |text| context.say(text))?;
    checks::check_columns(&source, &method)?;
    checks::check_estimator(&source, method.estimator, &mut |text| context.say(text))?;
    checks::check_tokenizer(&source, args)?;
    let mut trainer = Trainer::open(options(args, context, &method)?)?;
    let mut records = Records::open(args)?;
    announce(&trainer, args, context);
    let mut queue = VecDeque::new();
    while let Some(turns) = source.next_turns()? {
        queue.extend(turns);
    }
    checks::check_topk(&queue, &method, &mut |text| context.say(text))?;
    let bar = progress::bar(context, "train", Some(queue.len() as u64));
    let done = steps(&mut trainer, &mut queue, args, &bar, &mut |trained| {
        if let Some(policy) = &trained.policy {
            shelf.publish(policy, context)?;
        }
        records.write(&trained.metrics)
    });
    bar.finish_and_clear();
    let done = done?;
    close(&trainer, &done, &method, context)
}

/// What a run came to.
#[derive(Default)]
struct Done {
    trained: Vec<Trained>,
    /// Batches that made no step since all of their advantages are 0.
    zero: usize,
    /// Sound turns that did not fill a batch, and the size of one.
    left: Option<(usize, usize)>,
}

fn steps(
    trainer: &mut Trainer,
    queue: &mut VecDeque<Turn>,
    args: &Args,
    bar: &ProgressBar,
    each: &mut dyn FnMut(&Trained) -> anyhow::Result<()>,
) -> anyhow::Result<Done> {
    let mut done = Done::default();
    let wanted = args.batch_turns.map(|turns| turns as usize);
    let total = queue.len() as u64;
    loop {
        let samples = trainer.collect(queue, wanted);
        match wanted {
            _ if samples.is_empty() => break,
            Some(wanted) if samples.len() < wanted => {
                done.left = Some((samples.len(), wanted));
                break;
            }
            _ => {}
        }
        let before = trainer.refused().clone();
        match trainer.train(samples)? {
            Some(trained) => {
                each(&trained)?;
                if let Some(loss) = trained.metrics.loss {
                    bar.set_message(format!("loss {loss:.4}"));
                }
                done.trained.push(trained);
            }
            None => done.zero += usize::from(silence::is_zero(&before, trainer.refused())),
        }
        bar.set_position(total - queue.len() as u64);
    }
    Ok(done)
}

pub(super) fn options(args: &Args, context: &Context, method: &Method) -> anyhow::Result<Options> {
    let mut version_aliases = BTreeMap::from([("default".to_owned(), 0)]);
    version_aliases.extend(args.version_alias.iter().cloned());
    Ok(Options {
        model: args.model.clone(),
        out: args.out.clone(),
        settings: settings(args, method),
        admission: Admission {
            method: method.clone(),
            distillation: distillation(&args.distillation),
            old_log_probs: match args.old_log_probs {
                OldName::Recompute => OldLogProbs::Recompute,
                OldName::Rollout => OldLogProbs::Rollout,
            },
            max_staleness: args.max_staleness,
            version_aliases,
            assume_temperature: args.assume_temperature,
            // The trainer puts the model's in.
            vocabulary: 0,
        },
        terms: args.loss.terms(method),
        rates: rates(args),
        average: args.optimizer.ema,
        schedule: args.schedule.schedule(),
        epochs: args.epochs,
        parts: args.mini_batches,
        tokens_per_pass: args.tokens_per_pass as usize,
        dtype: args.dtype.map(|dtype| match dtype {
            DtypeName::F32 => Dtype::F32,
            DtypeName::Bf16 => Dtype::Bf16,
        }),
        rounding: rounding(args),
        compute: args.compute.compute()?,
        keep: args.keep,
        seed: context.seed,
    })
}

/// Returns how weights become bf16: of a model with adapters added to the nearest.
fn rounding(args: &Args) -> Rounding {
    match args.save_rounding {
        Some(RoundingName::Nearest) => Rounding::Nearest,
        None if args.compute.trains_adapters() => Rounding::Nearest,
        Some(RoundingName::Stochastic) | None => Rounding::Stochastic,
    }
}

fn distillation(args: &DistillationArgs) -> Distillation {
    Distillation {
        selection: match args.hint_selection {
            SelectionName::Sequence => HintSelection::Sequence,
            SelectionName::Token => HintSelection::Token,
            SelectionName::Shortest => HintSelection::Shortest,
        },
        subset: match args.subset {
            SubsetName::Student => SubsetIds::Student,
            SubsetName::Teacher => SubsetIds::Teacher,
            SubsetName::Overlap => SubsetIds::Overlap,
        },
        weights: match args.distill_weights {
            WeightsName::Policy => DistillWeights::Policy,
            WeightsName::Teacher => DistillWeights::Teacher,
        },
    }
}

fn rates(args: &Args) -> Rates {
    let optimizer = &args.optimizer;
    Rates {
        learning_rate: args.compute.learning_rate(optimizer.lr),
        weight_decay: optimizer.weight_decay,
        decay_all: optimizer.decay_all,
        clip_norm: optimizer.clip_norm,
        ..Rates::default()
    }
}

/// What the record in a policy's folder says about the run.
pub(super) fn settings(args: &Args, method: &Method) -> serde_json::Value {
    let (loss, optimizer, schedule) = (&args.loss, &args.optimizer, &args.schedule);
    serde_json::json!({
        "estimator": method.estimator.as_str(),
        "w_rl": method.reward_weight,
        "w_opd": method.distill_weight,
        "distill_clip": method.distill_clip,
        "hint_selection": format!("{:?}", args.distillation.hint_selection).to_lowercase(),
        "subset": format!("{:?}", args.distillation.subset).to_lowercase(),
        "distill_weights": format!("{:?}", args.distillation.distill_weights).to_lowercase(),
        "epochs": args.epochs,
        "mini_batches": args.mini_batches,
        "loss": format!("{:?}", loss.loss).to_lowercase(),
        "opsm_delta": loss.opsm_delta,
        "batch_turns": args.batch_turns,
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "dual_clip": loss.dual_bound(),
        "kl": format!("{:?}", loss.kl).to_lowercase(),
        "kl_coef": loss.kl_coef,
        "kl_unbiased": loss.kl_unbiased,
        "entropy_coef": loss.entropy_coef,
        "importance": format!("{:?}", loss.importance).to_lowercase(),
        "importance_low": loss.importance_low,
        "importance_high": loss.importance_high,
        "reduction": format!("{:?}", loss.reduction).to_lowercase(),
        "lr": args.compute.learning_rate(optimizer.lr),
        "warmup": schedule.warmup,
        "schedule": format!("{:?}", schedule.schedule).to_lowercase(),
        "total_steps": schedule.total_steps,
        "weight_decay": optimizer.weight_decay,
        "decay_all": optimizer.decay_all,
        "clip_norm": optimizer.clip_norm,
        "ema": optimizer.ema,
        "old_log_probs": format!("{:?}", args.old_log_probs).to_lowercase(),
        "max_staleness": args.max_staleness,
        "save_rounding": format!("{:?}", rounding(args)).to_lowercase(),
        "tokens_per_pass": args.tokens_per_pass,
        "compute": args.compute.settings(),
    })
}

pub(super) fn announce(trainer: &Trainer, args: &Args, context: &Context) {
    let step = trainer.step();
    let served = trainer.dtype();
    context.say(match step {
        0 => format!("starting from the model as step 0; policies are written in {served}"),
        _ => format!("resuming at step {step}; policies are written in {served}"),
    });
    match served {
        Dtype::Bf16 => {
            let how = format!("{:?}", rounding(args)).to_lowercase();
            context.say(format!("weights are rounded to bf16 ({how}) where they are written"));
        }
        Dtype::F32 if args.save_rounding.is_some() => {
            context.say("note: `--save-rounding` does nothing: policies are written in f32");
        }
        Dtype::F32 => {}
    }
    if args.old_log_probs == OldName::Rollout {
        context.say("old log-probs are the server's: importance weights are all 1");
    }
    for note in trainer.notes() {
        context.say(format!("warning: {note}"));
    }
}

/// Says what the run came to.
fn close(
    trainer: &Trainer,
    done: &Done,
    method: &Method,
    context: &Context,
) -> anyhow::Result<Exit> {
    let faults = trainer.faults();
    let policies = done.trained.iter().filter(|trained| trained.policy.is_some()).count();
    for trained in &done.trained {
        context.conclude(table(trained));
        warn(trained, context);
    }
    if !done.trained.is_empty() {
        context.say(health_lines::table(&health(&done.trained)?));
    }
    if let Some((have, need)) = done.left {
        context.say(format!("{have}/{need} turns wait for a full batch: train them with more"));
    }
    for (reason, count) in trainer.refused() {
        context.say(format!("not trained: {count} turns: {}", visible(reason)));
    }
    for fault in faults.iter().take(NAMED) {
        tell_fault(fault, context);
    }
    if faults.len() > NAMED {
        context.say(format!("and {} more broken rows", faults.len() - NAMED));
    }
    // Without any policy it is the reason, and told as that.
    if done.zero > 0 && policies > 0 {
        let why = silence::zero(method.estimator);
        context.say(format!("warning: {} batches made no step: {why}", done.zero));
    }
    if policies == 0 {
        no_policy(trainer, done, method, context)?;
    }
    let skipped = done.trained.iter().any(is_skipped);
    Ok(if faults.is_empty() && !skipped { Exit::Done } else { Exit::Partial })
}

/// Whether an update of a step was not made.
pub(super) fn is_skipped(trained: &Trained) -> bool {
    trained.policy.is_none() || trained.metrics.skipped_updates > 0
}

/// Says why no step was made.
fn no_policy(
    trainer: &Trainer,
    done: &Done,
    method: &Method,
    context: &Context,
) -> Result<(), Failure> {
    let reasons = match (silence::reasons(trainer.refused()), done.left) {
        (_, Some((have, need))) => format!("{have} turns are not the {need} of a batch"),
        (none, None) if none.is_empty() => "there are no turns".to_owned(),
        (reasons, None) => reasons,
    };
    context.say(format!("no step was made: {reasons}"));
    if let (Some(hint), None) = (silence::hint(trainer.refused(), method.estimator), done.left) {
        context.say(format!("hint: {hint}"));
    }
    let faults = trainer.faults();
    let sound = trainer.refused().values().sum::<u64>() > faults.len() as u64;
    match (faults.first(), sound, done.left) {
        (Some(fault), false, None) => {
            let problem = format!("every row is broken: turn {}: {}", fault.turn_id, fault.problem);
            Err(Failure::failed(problem))
        }
        _ => Ok(()),
    }
}

/// Answers the three questions by the steps of this run.
fn health(trained: &[Trained]) -> anyhow::Result<[Answer; 3]> {
    let step = |trained: &Trained| serde_json::from_value(serde_json::to_value(&trained.metrics)?);
    let steps: Vec<Step> = trained.iter().map(step).collect::<Result<_, _>>()?;
    Ok(health::answers(&Evidence { survey: &Survey::default(), steps: &steps }))
}

/// Names a broken row.
pub(super) fn tell_fault(fault: &Fault, context: &Context) {
    let (turn, problem) = (visible(&fault.turn_id), visible(&fault.problem));
    context.say(format!("turn {turn}: {problem}"));
}

pub(super) fn warn(trained: &Trained, context: &Context) {
    let metrics = &trained.metrics;
    let warn = |text: String| context.say(format!("warning: step {}: {text}", metrics.step));
    if let Some(gap) = metrics.log_prob_gap.filter(|gap| *gap > WIDE_GAP) {
        warn(format!(
            "the trainer's log-probs differ from the server's by {gap:.2} nats on average: were \
             these turns sampled by this model, at this temperature?"
        ));
    }
    if trained.policy.is_none() {
        // Nothing else that is measured of it says anything.
        warn(
            "its loss or gradient is not finite: no policy was made, its turns stay untrained"
                .into(),
        );
        return;
    }
    if metrics.skipped_updates > 0 {
        warn(format!(
            "{} updates were not finite and were skipped: turns of no other stay untrained",
            metrics.skipped_updates
        ));
    }
    if metrics.unusable > 0 {
        warn(format!("{} tokens have a teacher value that is not finite", metrics.unusable));
    }
    if let Some(changed) = metrics.weights_changed
        && changed < TINY_CHANGE
    {
        warn(format!(
            "only {:.2} % of the weights changed in the type they are served in",
            changed * 100.0
        ));
    }
    if metrics.distill_gap == Some(0.0) {
        warn(
            "the teacher pulls at nothing: it and the policy agree, or the hint was lost"
                .to_owned(),
        );
    }
    // Advantages that are all 0 are no term of the loss.
    if let Some(std) = metrics.advantage_std
        && std < 0.1
        && metrics.advantage_zero < Some(1.0)
    {
        warn(format!("advantages hardly differ (std {std:.4})"));
    }
    if metrics.advantage_min.is_some_and(|least| least > 0.0) {
        warn("all advantages are positive: nothing is discouraged".to_owned());
    }
}

pub(super) fn table(trained: &Trained) -> Table {
    let metrics = &trained.metrics;
    let mut table = asking::closing_table();
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
    row("step", metrics.step.to_string());
    row("  turns", metrics.turns.to_string());
    row("  tokens trained", metrics.tokens.to_string());
    row("  loss", number(metrics.loss));
    if metrics.distill_loss.is_some() {
        row("  distillation loss", number(metrics.distill_loss));
        row("  teacher - policy", number(metrics.distill_gap));
        row("  ids taught", number(metrics.subset_size));
        row("  overlap", number(metrics.overlap));
    }
    row("  entropy", number(metrics.entropy));
    row("  reward", number(metrics.reward));
    row("  advantage mean", number(metrics.advantage_mean));
    row("  advantage std", number(metrics.advantage_std));
    row("  clip fraction", number(metrics.clip_fraction));
    if metrics.opsm_dropped.is_some() {
        row("  dropped by OPSM", number(metrics.opsm_dropped));
    }
    row("  approximate KL", number(metrics.approximate_kl));
    row("  |trainer - server|", number(metrics.log_prob_gap));
    row("  staleness", number(metrics.staleness));
    row("  gradient norm", number(metrics.gradient_norm));
    row("  weights changed", number(metrics.weights_changed));
    row("  log-probs moved", number(metrics.moved));
    row("  seconds", format!("{:.1}", metrics.seconds));
    row(
        "  policy",
        match &trained.policy {
            Some(policy) => policy.display().to_string(),
            None => "skipped".to_owned(),
        },
    );
    table
}
