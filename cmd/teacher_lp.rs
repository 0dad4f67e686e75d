//! `oclaw teacher-lp`.

#[cfg(feature = "torch")]
mod ahead;
mod foretell;
mod keeper;
#[cfg(feature = "torch")]
mod local;
#[cfg(not(feature = "torch"))]
#[path = "teacher_lp/no_local.rs"]
mod local;
mod places;
mod scorer;
mod whom;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use comfy_table::Table;
use oclaw::stage::{self, Output, Tally};
use oclaw::table::Source;
use oclaw::teacher_lp::{self, Teacher};
use oclaw::template::Chat;
use oclaw::trajectory::{Turn, Writer};

use crate::answers::{Answers, Keeping};
use crate::asking;
use crate::common::Context;
use crate::files::Files;
use crate::follow::{Counting, Worked};
use crate::progress;
use crate::report::{Exit, Failure};
use crate::servers::Servers;
use crate::spending::{BUDGET, Budget, Meter};
use crate::units;
use crate::visible::visible;
use keeper::Keeper;
use scorer::Scorer;

/// Score each answer again as if its prompt had held the hint.
///
/// For every hint the prompt is rendered with `[user's hint / instruction]` and
/// the hint at the end of the last request, the stored response ids are appended
/// unchanged, and the log-prob of each is recorded. Fills `teacher`,
/// `teacher_temperature`, `teacher_log_probs` and `teacher_error`. Turns without
/// hints or ids are left without; that is no failure.
///
/// The teacher is a model run in this process (`--model`), or a server that can
/// score given ids (`--engine`, SGLang or vLLM; several of one model share the
/// calls), which needs `--tokenizer`, the folder of the policy's tokenizer and chat
/// template. In this process a beginning that sequences share, as the hints of a
/// turn do, is computed once, which changes a log-prob by some 1e-5 at most, and
/// more where products are bf16. `--model` divides logits
/// by the row's sampling temperature where the row's own log-probs are of
/// tempered logits; a server is raw, and `teacher_temperature` says 1.
///
/// `--topk 4` also records the 4 likeliest tokens at each position: the
/// teacher's, per hint (`teacher_topk_*`), and the student's under the plain
/// prompt (`student_topk_*`), with the teacher's log-probs of the latter
/// (`teacher_at_student`). The student is the policy that sampled the turn, from
/// the folder that `train` fills (`--policy`), or one for all turns (`--student`),
/// or else the model of `--model`. If a student is a server, all numbers are raw.
/// A hint that lacks any of it counts as failed. `hybrid`, the default of `oclaw
/// advantage`, learns from these; other estimators but `topk-kl` do without
/// (`--topk 0`), and each turn costs one score less.
///
/// Scores are kept in a file (`--cache`) under the ids and the model's weights (for
/// a server its model and weight version), so that the same run scores nothing
/// twice, and a server that is away is missed only by what nobody scored yet; a
/// spent budget leaves the hints of the last turns with the error `budget`;
/// `--dry-run` says what there is to score. If all servers are gone, the run ends with
/// exit code 4 and writes nothing; if they refuse the key, with exit code 2.
///
/// `--follow` is as in `oclaw judge`. Before each shard it looks whether the name of
/// a model's folder leads to another one by now, or its files are others, as with a
/// moving average that is written anew: then that is read, and the shard's
/// provenance says which it was, with a hash of its files unless `--no-cache` is
/// given. As long as it cannot be, the shard waits.
///
/// Exit code 3 means that some hint was tried and got no log-probs, or that the
/// budget left one out.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    /// Folder of the teacher
    #[arg(long, value_name = "DIR", conflicts_with = "engine")]
    model: Option<PathBuf>,
    #[command(flatten)]
    servers: Servers,
    /// Folder of the policy's tokenizer and chat template [default: that of --model]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// How many of the likeliest tokens to record at each position; 0 for none [default: 4; 0 without a student]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(0..=64))]
    topk: Option<u16>,
    /// Folder of policies, of which the one that sampled a turn is its student
    #[arg(long, value_name = "DIR")]
    policy: Option<PathBuf>,
    /// Folder or address of the student of all turns
    #[arg(long, value_name = "DIR|URL", conflicts_with = "policy")]
    student: Option<PathBuf>,
    /// Name of the student on its server, if that has several models
    #[arg(long, value_name = "NAME", requires = "student")]
    student_model: Option<String>,
    /// File with the key of the student's server
    #[arg(long, value_name = "FILE", requires = "student")]
    student_key_file: Option<PathBuf>,
    /// Type of the products of models in this process
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = DtypeName::Auto)]
    dtype: DtypeName,
    /// Turns under way at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    at_once: u32,
    /// Limit of one call of a server, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=units::YEAR))]
    timeout: u64,
    /// Further tries of a call that failed for a passing reason
    #[arg(long, value_name = "N", default_value_t = 2)]
    retries: u32,
    #[command(flatten)]
    keeping: Keeping,
    #[command(flatten)]
    budget: Budget,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DtypeName {
    /// That of the checkpoint
    Auto,
    /// 32-bit floats
    F32,
    /// 16-bit floats with the exponent of f32
    Bf16,
}

/// Scores a table.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if args.model.is_none() && !args.servers.any() {
        return Err(Failure::usage("no teacher")
            .hint("give `--model DIR` or `--engine URL`")
            .into());
    }
    let Some(folder) = args.tokenizer.clone().or_else(|| args.model.clone()) else {
        return Err(Failure::usage("a server takes ids, and nobody here makes any")
            .hint("give the folder of the policy's tokenizer and chat template by `--tokenizer`")
            .into());
    };
    let chat = Chat::load(&folder)?;
    if args.budget.dry_run {
        return context.block_on(foretell::foretell(&args, context, (&chat, &folder)));
    }
    let vocabulary = vocabulary(&chat, &folder);
    context.block_on(async {
        let files = &args.files;
        let scorer = async |kept| {
            let answers = Answers::open(&args.keeping, &context.command)?;
            let keeper = Keeper { answers, meter: Meter::new(&args.budget), vocabulary };
            Scorer::new((&args, kept), &chat, keeper, context).await
        };
        let with = |scorer| With {
            args: &args,
            context,
            chat: &chat,
            folder: &folder,
            vocabulary,
            scorer,
            counts: RefCell::default(),
            warned: Cell::default(),
            untold: Cell::default(),
        };
        let Some(route) = files.route(context)? else {
            let source = files.open(context)?;
            check_tokenizer(&source, &chat, &folder, &|text| context.say(text))?;
            let with = with(scorer(true).await?);
            tell_of_no_student(&args, context);
            let output = files.output();
            let tally = with.scorer.unless_gone(with.table(source, &output)).await?;
            context.conclude(with.counts.into_inner().table(&tally, &with.scorer));
            return Ok(if tally.failed > 0 { Exit::Partial } else { Exit::Done });
        };
        let connect = async || scorer(false).await;
        let Some(scorer) = route.patiently(connect).await? else { return Ok(Exit::Done) };
        scorer.wait(route.tries());
        tell_of_no_student(&args, context);
        let with = with(scorer);
        let shard = async |source, output: &Output| with.shard(source, output).await;
        let followed = route.run(shard, || with.scorer.meter().is_spent(1)).await?;
        let table = with.counts.borrow().table(&followed.tally, &with.scorer);
        route.conclude(followed, table)
    })
}

/// Says what a table lacks for which nobody was named.
fn tell_of_no_student(args: &Args, context: &Context) {
    if args.topk.is_none() && args.topk() == 0 {
        context.say(
            "note: no likeliest tokens are recorded, which `hybrid` learns from: they need a \
             student (`--policy DIR` or `--student DIR|URL`); `--topk 0` says that none are wanted",
        );
    }
}

/// Whom a table is scored with.
struct With<'a> {
    args: &'a Args,
    context: &'a Context,
    chat: &'a Chat,
    folder: &'a Path,
    vocabulary: usize,
    scorer: Scorer,
    counts: RefCell<Counts>,
    /// Whether it was warned of another chat template.
    warned: Cell<bool>,
    /// Whether it was warned of a table that does not tell its tokenizer.
    untold: Cell<bool>,
}

impl With<'_> {
    /// Scores one table.
    async fn table(&self, source: Source, output: &Output) -> anyhow::Result<Tally> {
        let Self { args, context, scorer, folder, .. } = self;
        if source.provenance().tokenizer_hash.is_none() && !self.untold.replace(true) {
            context.say(format!(
                "warning: the table does not tell the tokenizer of its ids: that of `{}` is taken for it",
                folder.display()
            ));
        }
        let mut plan = args.files.plan(context, Writer::TeacherLp, &source)?;
        plan.at_once = args.at_once as usize;
        plan.needs = &["hints"];
        plan.usage = Some(scorer.meter().usage());
        if let Some(line) = &mut plan.line {
            line.inputs.extend(scorer.told());
        }
        let bar = progress::bar(context, "teacher-lp", source.total_rows());
        let name = scorer.name();
        let teacher = Teacher {
            chat: self.chat,
            name: &name,
            tempers: scorer.tempers(),
            topk: args.topk(),
            vocabulary: self.vocabulary,
        };
        let note = async |turn: Turn| {
            let share = scorer.share(&turn);
            let score = async |request| scorer.score(request, &share).await;
            let mut turn = teacher_lp::teach(turn, &teacher, score).await;
            left_out(&mut turn);
            self.counts.borrow_mut().add(&turn);
            turn
        };
        let watch = |tally: &Tally| bar.set_position(tally.rows);
        let done = stage::annotate(source, output, &plan, note, &watch).await;
        bar.finish_and_clear();
        Ok(done?)
    }

    /// Scores one shard of a followed folder.
    async fn shard(&self, source: Source, output: &Output) -> anyhow::Result<Worked> {
        let say = |text: String| {
            if !self.warned.replace(true) {
                self.context.say(text);
            }
        };
        check_tokenizer(&source, self.chat, self.folder, &say)?;
        let counting = Counting::start(&self.counts);
        Ok(match self.scorer.attend(self.table(source, output)).await? {
            Ok(tally) => counting.settle(tally, |counts| counts.turns),
            Err(reason) => Worked::Away(reason),
        })
    }
}

/// What the budget left out has the one error that says so, whoever was to be
/// asked.
fn left_out(turn: &mut Turn) {
    for error in turn.teacher_error.iter_mut().flatten().flatten() {
        if error.strip_prefix("student: ") == Some(BUDGET) {
            *error = BUDGET.to_owned();
        }
    }
}

/// Ids mean nothing under another vocabulary. Another chat template only asks in
/// another way, which is said.
fn check_tokenizer(
    source: &Source,
    chat: &Chat,
    folder: &Path,
    say: &dyn Fn(String),
) -> anyhow::Result<()> {
    let recorded = source.provenance();
    let found = chat.tokenizer.hash();
    if let Some(hash) = recorded.tokenizer_hash.as_ref().filter(|hash| **hash != found) {
        return Err(Failure::usage(format!(
            "the tokenizer of `{}` ({found}) is not the one that made the ids ({hash})",
            folder.display()
        ))
        .hint("give the policy's folder by `--tokenizer`; a teacher must share its vocabulary")
        .into());
    }
    let found = chat.template_hash();
    if let Some(hash) = recorded.chat_template_hash.as_ref().filter(|hash| **hash != found) {
        say(format!(
            "warning: the chat template of `{}` ({found}) is not the one that made the prompts ({hash})",
            folder.display()
        ));
    }
    Ok(())
}

/// Returns how many ids there are: models may have more than their tokenizer
/// names.
fn vocabulary(chat: &Chat, folder: &Path) -> usize {
    let named = chat.tokenizer.vocab_size();
    let config = std::fs::read(folder.join("config.json")).unwrap_or_default();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap_or_default();
    let stated = config.get("vocab_size").and_then(serde_json::Value::as_u64).unwrap_or_default();
    named.max(stated as usize)
}

/// Most reasons of failures that are shown.
const MOST_REASONS: usize = 8;

#[derive(Debug, Clone, Default)]
struct Counts {
    turns: u64,
    hints: u64,
    tokens: u64,
    failures: BTreeMap<String, u64>,
}

impl Counts {
    fn add(&mut self, turn: &Turn) {
        let scored: Vec<_> = turn.teacher_log_probs.iter().flatten().flatten().collect();
        self.turns += u64::from(!scored.is_empty());
        self.hints += scored.len() as u64;
        self.tokens += scored.iter().map(|values| values.len() as u64).sum::<u64>();
        for error in turn.teacher_error.iter().flatten().flatten() {
            asking::count_reason(&mut self.failures, error.chars().take(80).collect());
        }
    }

    fn table(&self, tally: &Tally, scorer: &Scorer) -> Table {
        let mut table = asking::closing_table();
        table.add_row(["turns".to_owned(), tally.rows.to_string()]);
        if tally.kept > 0 {
            table.add_row(["  scored before".to_owned(), tally.kept.to_string()]);
        }
        table.add_row(["  with a teacher".to_owned(), self.turns.to_string()]);
        table.add_row(["  failed".to_owned(), tally.failed.to_string()]);
        table.add_row(["hints scored".to_owned(), self.hints.to_string()]);
        table.add_row(["response tokens scored".to_owned(), self.tokens.to_string()]);
        for (reason, count) in self.failures.iter().take(MOST_REASONS) {
            table.add_row([format!("failed: {}", visible(reason)), count.to_string()]);
        }
        let others: u64 = self.failures.values().skip(MOST_REASONS).sum();
        if others > 0 {
            table.add_row(["failed: for other reasons".to_owned(), others.to_string()]);
        }
        scorer.rows(&mut table);
        table
    }
}
