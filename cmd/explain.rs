//! `oclaw explain`: the story of one turn.

mod heat;
mod page;
mod story;

use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::PathBuf;

use clap::ValueEnum;
use oclaw::table::Source;
use oclaw::template::Tokenizer;
use oclaw::trajectory::Turn;

use crate::common::Context;
use crate::files::Inputs;
use crate::reduction::ReductionName;
use crate::report::{Exit, Failure};
use crate::train::stated_estimator;
use crate::visible::visible;
use page::Style;
use story::{Batch, Loss, Story};

/// Tell the story of one turn
///
/// What was asked (the end of the prompt), answered, and said next; each vote with
/// the judge's words; the hints, `*` before the one that teaches; where the reward
/// came from and which signal it made; and per response token: id, text (with
/// `--model`), the server's log-prob, the teacher's, the advantage, the mask, and
/// what it adds to the loss.
///
/// All rows read stand for the batch of one step, at ratio 1. With `--reduction
/// sample`, as `train` has it by default, a token adds -A / (tokens of its turn ×
/// turns), else -A / (tokens of all turns); only trained tokens count, and turns with
/// some. A token with A > 0 becomes likelier, one with A < 0 less likely.
///
/// The shares of all turns add up to the loss of the first step of `train`, but for
/// what only it knows: its own log-probs, from which it computes A anew, the
/// importance weights (both near to nothing where it agrees with the server), and
/// the rows that it refuses, such as those of too old a policy. Nor is there a share of
/// what is no loss of advantages: all of `topk-kl`, and the second term of `hybrid`.
///
/// On a terminal advantages are green above 0 and red below, stronger for larger
/// ones; without colours (`NO_COLOR`, a pipe) `+` and `-` stand for it, up to three.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    inputs: Inputs,
    /// The turn's id, or a beginning that no other turn has
    #[arg(long, value_name = "ID")]
    turn: String,
    /// Model folder whose tokenizer spells the tokens
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Messages of the prompt to show, counted from its end
    #[arg(long, value_name = "N", default_value_t = 3)]
    tail: usize,
    /// How the losses of tokens become one
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    reduction: ReductionName,
    /// When to use colours
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    color: When,
    /// Columns of the page [default: the terminal's, else 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(40..))]
    width: Option<u16>,
    /// The whole story as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// On a terminal, unless `NO_COLOR` is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Candidates that are named when the id is not clear.
const NAMED: usize = 8;

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let mut source = args.inputs.open(context)?;
    let mut search = Search::new(&args.turn);
    let loss = Loss::of(stated_estimator(&source));
    let mut batch = Batch::new(args.reduction, loss);
    while let Some(turns) = source.next_turns()? {
        for turn in turns {
            batch.add(&turn);
            search.see(turn);
        }
    }
    let turn = search.found()?;
    let tokenizer = tokenizer(&args, &source, &turn)?;
    let story = Story::of(&turn, &batch, tokenizer.as_ref(), args.tail);
    let mut out = BufWriter::new(io::stdout().lock());
    match args.json {
        true => {
            serde_json::to_writer(&mut out, &story).map_err(io::Error::from)?;
            out.write_all(b"\n")?;
        }
        false => page::print(&mut out, &story, style(&args))?,
    }
    out.flush()?;
    Ok(Exit::Done)
}

fn style(args: &Args) -> Style {
    let terminal = io::stdout().is_terminal();
    let silenced = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let width = args.width.or_else(|| comfy_table::Table::new().width()).unwrap_or(100);
    Style {
        colored: match args.color {
            When::Always => true,
            When::Never => false,
            When::Auto => terminal && !silenced,
        },
        width: width.max(40),
    }
}

fn tokenizer(args: &Args, source: &Source, turn: &Turn) -> anyhow::Result<Option<Tokenizer>> {
    let Some(folder) = &args.model else { return Ok(None) };
    let tokenizer = Tokenizer::load(folder)?;
    let recorded = source.provenance().tokenizer_hash.as_deref();
    let foreign =
        recorded.is_some_and(|hashes| !hashes.split(',').any(|it| it == tokenizer.hash()));
    let ids = turn.response_ids.as_deref().unwrap_or_default();
    let unknown = ids.iter().find(|id| tokenizer.token_of(**id).is_none());
    match unknown {
        _ if foreign => Err(Failure::usage(format!(
            "the tokenizer of `{}` is not the one that made the ids",
            folder.display()
        ))
        .hint("name the model that gave the answers by `--model`, or leave it out")
        .into()),
        Some(id) => {
            let problem = format!("the tokenizer of `{}` has no id {id}", folder.display());
            Err(Failure::usage(problem).hint("name the model that gave the answers").into())
        }
        None => Ok(Some(tokenizer)),
    }
}

/// Looks for one turn among all.
struct Search<'a> {
    wanted: &'a str,
    /// Turns that begin as wanted; of the same turn in several tables the last.
    fitting: Vec<Turn>,
    more: bool,
    /// The first turns seen, for those who guessed.
    first: Vec<String>,
    seen: usize,
}

impl<'a> Search<'a> {
    fn new(wanted: &'a str) -> Self {
        Self { wanted, fitting: Vec::new(), more: false, first: Vec::new(), seen: 0 }
    }

    fn see(&mut self, turn: Turn) {
        self.seen += 1;
        if self.first.len() < NAMED {
            self.first.push(name(&turn));
        }
        if !turn.turn_id.starts_with(self.wanted) {
            return;
        }
        match self.fitting.iter().position(|known| known.turn_id == turn.turn_id) {
            Some(place) => self.fitting[place] = turn,
            // The id itself beats ids that it begins.
            None if turn.turn_id == self.wanted => self.fitting.insert(0, turn),
            None if self.fitting.len() < NAMED => self.fitting.push(turn),
            None => self.more = true,
        }
    }

    fn found(mut self) -> Result<Turn, Failure> {
        let wanted = visible(self.wanted);
        let exact = self.fitting.first().is_some_and(|turn| turn.turn_id == self.wanted);
        match self.fitting.len() {
            0 if self.seen == 0 => Err(Failure::usage("there is no turn at all")),
            0 => {
                let more = self.seen > self.first.len();
                let problem = format!("no turn's id begins with `{wanted}`");
                Err(Failure::usage(problem).hint(candidates("there are", &self.first, more)))
            }
            1 => Ok(self.fitting.remove(0)),
            _ if exact => Ok(self.fitting.remove(0)),
            _ => {
                let names: Vec<String> = self.fitting.iter().map(name).collect();
                let problem = format!("several turns' ids begin with `{wanted}`");
                Err(Failure::usage(problem).hint(candidates("one of", &names, self.more)))
            }
        }
    }
}

fn name(turn: &Turn) -> String {
    let session = visible(&turn.session_id);
    format!("`{}` (session {session}, turn {})", visible(&turn.turn_id), turn.turn)
}

fn candidates(begin: &str, names: &[String], more: bool) -> String {
    let end = if more { ", and more" } else { "" };
    format!("{begin} {}{end}", names.join(", "))
}
