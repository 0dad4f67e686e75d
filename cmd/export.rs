//! `oclaw export`: turns for other trainers.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use oclaw::interchange::{Left, Preferences, Slime, sft, teacher_candidate};
use oclaw::table::Source;

use crate::asking;
use crate::common::Context;
use crate::files::{Aside, Inputs};
use crate::report::{Exit, Failure};

/// Write turns as other trainers read them, one JSON object a line
///
///     sft         {"messages", "tools"?}, the answer last; rows with a reward above
///                 0, or from --min-reward on
///     preference  {"prompt", "chosen", "rejected", "tools"?}, TRL's conversational
///                 form. Rows with the same messages and tools are compared: the
///                 best is chosen over each that is strictly worse. A turn with a
///                 negative reward that a person followed up on is rejected for its
///                 direct successor with a positive one, under the earlier prompt
///     slime       the fields of slime's Sample, with ids and log-probs as recorded.
///                 `scripts/slime/` feeds slime from the tables themselves
///
/// The reward is the resolved one, else a stated one, else the judge's majority.
/// Rows that a shape cannot hold are left out and counted by reason on standard
/// error.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
    /// Shape of the lines
    #[arg(long, value_name = "SHAPE", value_enum)]
    to: To,
    /// File to write, whole or not at all [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Least reward of a row for `sft`
    #[arg(long, value_name = "REWARD", allow_negative_numbers = true)]
    min_reward: Option<f32>,
    /// Only rows with log-probs of a teacher for `slime`
    #[arg(long)]
    with_teacher: bool,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Sft,
    Preference,
    Slime,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if args.min_reward.is_some() && args.to != To::Sft {
        return Err(Failure::usage("`--min-reward` is for `--to sft`").into());
    }
    if args.with_teacher && args.to != To::Slime {
        return Err(Failure::usage("`--with-teacher` is for `--to slime`").into());
    }
    let mut source = args.inputs.open(context)?;
    let mut lines = Lines::open(args.output.as_deref())?;
    let mut table = asking::closing_table();
    let left = match args.to {
        To::Sft => fine_tuning(&mut source, &mut lines, args.min_reward)?,
        To::Preference => {
            let (left, rules) = preferences(&mut source, &mut lines)?;
            for (rule, count) in rules {
                table.add_row([format!("pairs by {rule}"), count.to_string()]);
            }
            left
        }
        To::Slime => {
            let (left, untaught) = samples(&mut source, &mut lines, args.with_teacher)?;
            if untaught > 0 {
                let what = "rows without a teacher, so that no sample has one";
                table.add_row([what.to_owned(), untaught.to_string()]);
            }
            left
        }
    };
    let written = lines.finish()?;
    table.add_row(["lines written".to_owned(), written.to_string()]);
    for (reason, count) in left {
        table.add_row([format!("left out: {reason}"), count.to_string()]);
    }
    context.conclude(table);
    Ok(Exit::Done)
}

fn fine_tuning(source: &mut Source, lines: &mut Lines, least: Option<f32>) -> anyhow::Result<Left> {
    let mut left = Left::new();
    while let Some(turns) = source.next_turns()? {
        for turn in &turns {
            match sft(turn, least) {
                Ok(line) => lines.write(&line)?,
                Err(reason) => *left.entry(reason).or_default() += 1,
            }
        }
    }
    Ok(left)
}

fn preferences(source: &mut Source, lines: &mut Lines) -> anyhow::Result<(Left, Left)> {
    let mut preferences = Preferences::default();
    while let Some(turns) = source.next_turns()? {
        turns.iter().for_each(|turn| preferences.add(turn));
    }
    let (pairs, left) = preferences.finish();
    let mut rules = Left::new();
    for pair in pairs {
        lines.write(&pair.line)?;
        *rules.entry(pair.rule).or_default() += 1;
    }
    Ok((left, rules))
}

/// Writes samples. Either all have a teacher's log-probs or none has: if the rows
/// differ and nobody asked for them, they are left out of all, and how many rows
/// are the cause of it is returned.
fn samples(source: &mut Source, lines: &mut Lines, wanted: bool) -> anyhow::Result<(Left, u64)> {
    let (mut teacher, mut untaught) = (wanted, 0);
    if !wanted {
        source.hold()?;
        let (mut with, mut without) = (0_u64, 0_u64);
        while let Some(turns) = source.next_turns()? {
            let plain = Slime::default();
            for turn in turns.iter().filter(|turn| plain.sample(turn, 0, 0).is_ok()) {
                match teacher_candidate(turn) {
                    Some(_) => with += 1,
                    None => without += 1,
                }
            }
        }
        source.rewind()?;
        teacher = with > 0 && without == 0;
        untaught = if with > 0 { without } else { 0 };
    }
    let slime = Slime { teacher };
    let mut left = Left::new();
    let mut groups: std::collections::HashMap<String, u64> = std::collections::HashMap::new();
    while let Some(turns) = source.next_turns()? {
        for turn in &turns {
            let next = groups.len() as u64;
            let known = groups.get(&turn.request_id).copied();
            match slime.sample(turn, lines.count, known.unwrap_or(next)) {
                Ok(line) => {
                    groups.entry(turn.request_id.clone()).or_insert(next);
                    lines.write(&line)?;
                }
                Err(reason) => *left.entry(reason).or_default() += 1,
            }
        }
    }
    Ok((left, untaught))
}

/// Lines being written; a file gets its name when it is whole.
struct Lines {
    out: Out,
    count: u64,
}

enum Out {
    File(Aside),
    Standard(BufWriter<io::StdoutLock<'static>>),
}

impl Lines {
    fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let out = match path.filter(|path| path.as_os_str() != "-") {
            Some(path) => Out::File(Aside::create(path)?),
            None => Out::Standard(BufWriter::new(io::stdout().lock())),
        };
        Ok(Self { out, count: 0 })
    }

    fn write(&mut self, line: &serde_json::Value) -> io::Result<()> {
        self.count += 1;
        match &mut self.out {
            Out::File(file) => writeln!(file, "{line}"),
            Out::Standard(out) => writeln!(out, "{line}"),
        }
    }

    fn finish(self) -> anyhow::Result<u64> {
        match self.out {
            Out::File(file) => file.finish()?,
            Out::Standard(mut out) => out.flush()?,
        }
        Ok(self.count)
    }
}
