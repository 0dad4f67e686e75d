//! The `oclaw` program: parses the command line, runs one subcommand, turns its
//! result into an exit code.

mod advantage;
mod answers;
mod asking;
mod away;
mod cache;
mod chat;
mod check;
mod common;
mod devices;
mod embedded;
mod engine;
mod export;
mod explain;
mod files;
mod forget;
mod follow;
mod forecast;
mod convert;
mod gate;
mod health_lines;
mod hint;
mod hours;
mod import;
mod init;
mod judge;
mod lint;
mod r#loop;
mod man;
mod progress;
mod replay;
mod redact;
mod reduction;
mod report;
mod run_folder;
mod run_report;
mod serve;
mod servers;
mod settings;
mod simulate;
mod spending;
mod stats;
mod stores;
mod sync_weights;
mod teacher_lp;
mod train;
mod view;
mod units;
mod visible;

use clap::{Parser, Subcommand};

use common::{Context, Shared};
use report::Exit;

/// Agents that get better by being talked to.
///
/// Each subcommand is a filter over tables of chat turns: Parquet files at
/// rest, Arrow streams in a pipe. `oclaw serve` captures live chats, `judge`,
/// `hint` and `teacher-lp` annotate them, `advantage` turns the notes into a
/// training signal, `train` makes a new policy of it and `sync-weights` hands
/// it to the running server.
///
/// Settings come from the command line, else from the environment
/// (`OCLAW_JUDGE_VOTES` for `judge --votes`), else from the section of the
/// subcommand in the `--config` file, else from the default.
#[derive(Parser, Debug)]
#[command(name = "oclaw", version, max_term_width = 100, subcommand_required = true)]
struct Cli {
    #[command(flatten)]
    shared: Shared,
    #[command(subcommand)]
    command: Command,
}

/// The subcommands, in the order of the loop.
#[derive(Subcommand, Debug)]
enum Command {
    Serve(serve::Args),
    Judge(judge::Args),
    Hint(hint::Args),
    TeacherLp(teacher_lp::Args),
    Advantage(advantage::Args),
    Train(train::Args),
    SyncWeights(sync_weights::Args),
    Init(init::Args),
    Check(check::Args),
    Loop(r#loop::Args),
    View(view::Args),
    Lint(lint::Args),
    Replay(replay::Args),
    Gate(gate::Args),
    Simulate(simulate::Args),
    Import(import::Args),
    Export(export::Args),
    Redact(redact::Args),
    Forget(forget::Args),
    Stats(stats::Args),
    Explain(explain::Args),
    Report(run_report::Args),
    Engine(engine::Args),
    Chat(chat::Args),
    Convert(convert::Args),
    Cache(cache::Args),
    Man(man::Args),
    Completions(man::Completions),
}

impl Command {
    fn run(self, context: &Context) -> anyhow::Result<Exit> {
        match self {
            Self::Serve(args) => serve::run(args, context),
            Self::Judge(args) => judge::run(args, context),
            Self::Hint(args) => hint::run(args, context),
            Self::TeacherLp(args) => teacher_lp::run(args, context),
            Self::Advantage(args) => advantage::run(args, context),
            Self::Train(args) => train::run(args, context),
            Self::SyncWeights(args) => sync_weights::run(args, context),
            Self::Init(args) => init::run(args, context),
            Self::Check(args) => check::run(args, context),
            Self::Loop(args) => r#loop::run(args, context),
            Self::View(args) => view::run(args, context),
            Self::Lint(args) => lint::run(args, context),
            Self::Replay(args) => replay::run(args, context),
            Self::Gate(args) => gate::run(args, context),
            Self::Simulate(args) => simulate::run(args, context),
            Self::Import(args) => import::run(args, context),
            Self::Export(args) => export::run(args, context),
            Self::Redact(args) => redact::run(args, context),
            Self::Forget(args) => forget::run(args, context),
            Self::Stats(args) => stats::run(args, context),
            Self::Explain(args) => explain::run(args, context),
            Self::Report(args) => run_report::run(args, context),
            Self::Engine(args) => engine::run(args, context),
            Self::Chat(args) => chat::run(args, context),
            Self::Convert(args) => convert::run(args, context),
            Self::Cache(args) => cache::run(args, context),
            Self::Man(args) => man::run(args, context),
            Self::Completions(args) => man::completions(args, context),
        }
    }
}

fn main() {
    let code = match settings::parse::<Cli>() {
        Ok(parsed) => {
            common::start(parsed, |cli: &Cli| &cli.shared, |cli, context| cli.command.run(context))
        }
        Err(error) => report::usage(&error),
    };
    report::leave(code)
}
