//! What every subcommand shares: the flags, logging, signals and the context
//! that `run` receives.

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use clap::{ArgAction, FromArgMatches};
use oclaw::store::Fetched;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::report::{self, Exit, Failure};
use crate::settings::{Parsed, Setting};
use crate::stores::StoreArgs;
use crate::visible::visible_lines;

/// Flags that mean the same in every subcommand.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Common options")]
pub(crate) struct Shared {
    /// Read settings from this TOML file
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<std::path::PathBuf>,
    /// Print the resolved settings with their origins, and stop
    #[arg(long, global = true)]
    show_settings: bool,
    /// Seed of everything random in this run
    #[arg(long, global = true, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Leave the command line and input hashes out of the files written
    #[arg(long, global = true)]
    no_provenance: bool,
    /// Say only what went wrong
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Log more (-v what is done, -vv why)
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    #[command(flatten)]
    stores: StoreArgs,
}

/// What `run` receives besides its own flags.
pub(crate) struct Context {
    /// Name of the subcommand, as typed.
    pub(crate) command: String,
    /// Seed of everything random.
    pub(crate) seed: u64,
    /// Whether files carry where they came from.
    pub(crate) provenance: bool,
    /// Whether only failures are reported.
    pub(crate) quiet: bool,
    /// How much to log.
    pub(crate) verbose: u8,
    /// Where copies of objects are kept.
    pub(crate) stores: StoreArgs,
    /// Copies that are read until the end.
    held: Mutex<Vec<Fetched>>,
    runtime: Runtime,
    /// The configuration file, if there is one.
    pub(crate) config: Option<std::path::PathBuf>,
    draining: Arc<AtomicBool>,
    interrupted: watch::Receiver<bool>,
    last_act: LastAct,
}

/// What is done before the second signal ends the process.
type LastAct = Arc<Mutex<Option<Box<dyn Fn() + Send>>>>;

impl Context {
    /// Runs a future to its end.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Takes the first SIGINT or SIGTERM over from the default, which ends a
    /// batch command with exit code 130. Returns a receiver that becomes true
    /// then; the second signal ends the process at once.
    pub(crate) fn drain_on_signal(&self) -> watch::Receiver<bool> {
        self.draining.store(true, Ordering::SeqCst);
        self.interrupted.clone()
    }

    /// Says what to do before the second signal ends the process.
    pub(crate) fn at_the_second_signal(&self, act: impl Fn() + Send + 'static) {
        if let Ok(mut last_act) = self.last_act.lock() {
            *last_act = Some(Box::new(act));
        }
    }

    /// Keeps copies of objects where they are until the process ends.
    pub(crate) fn hold(&self, copies: Vec<Fetched>) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).extend(copies);
    }

    /// Prints a line of talk on stderr, unless `--quiet`.
    pub(crate) fn say(&self, text: impl std::fmt::Display) {
        self.sayer()(text.to_string());
    }

    /// Returns what prints such a line, for those who outlive this.
    pub(crate) fn sayer(&self) -> impl Fn(String) + Send + Sync + 'static + use<> {
        let quiet = self.quiet;
        move |text: String| {
            if !quiet {
                // In one piece: the stages of a pipe share stderr. A closed one is no
                // reason to fail.
                let text = visible_lines(&text);
                let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
            }
        }
    }

    /// Prints the closing table under the name of the stage.
    pub(crate) fn conclude(&self, table: impl std::fmt::Display) {
        self.say(format!("oclaw {}\n{table}", self.command));
    }
}

/// The outcome of printing data.
pub(crate) trait Printing<T> {
    /// Says of a failure that it was standard output's.
    fn printed(self) -> anyhow::Result<T>;
}

impl<T> Printing<T> for std::io::Result<T> {
    fn printed(self) -> anyhow::Result<T> {
        self.context("cannot write to standard output")
    }
}

/// Runs a subcommand between set-up and exit code, which it returns.
pub(crate) fn start<C: FromArgMatches>(
    parsed: Parsed,
    shared: fn(&C) -> &Shared,
    run: impl FnOnce(C, &Context) -> anyhow::Result<Exit>,
) -> u8 {
    let command = parsed.matches.subcommand_name().unwrap_or_default().to_owned();
    let cli = match C::from_arg_matches(&parsed.matches) {
        Ok(cli) => cli,
        Err(error) => return report::usage(&error),
    };
    let flags = shared(&cli);
    if flags.show_settings {
        return match print_settings(&command, &parsed.settings) {
            Ok(()) => 0,
            Err(error) => report::error(&command, &error),
        };
    }
    install_logger(flags.verbose);
    let outcome = context(command.clone(), flags).and_then(|context| {
        parsed.warnings.iter().for_each(|warning| context.say(warning));
        run(cli, &context)
    });
    match outcome {
        Ok(exit) => exit.code(),
        Err(error) => report::error(&command, &error),
    }
}

fn context(command: String, flags: &Shared) -> anyhow::Result<Context> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let draining = Arc::new(AtomicBool::new(false));
    let (sender, interrupted) = watch::channel(false);
    let last_act = LastAct::default();
    runtime.spawn(watch_signals(draining.clone(), sender, last_act.clone()));
    Ok(Context {
        command,
        seed: flags.seed,
        provenance: !flags.no_provenance,
        quiet: flags.quiet,
        verbose: flags.verbose,
        stores: flags.stores.clone(),
        held: Mutex::default(),
        runtime,
        config: flags.config.clone(),
        draining,
        interrupted,
        last_act,
    })
}

async fn watch_signals(draining: Arc<AtomicBool>, sender: watch::Sender<bool>, last_act: LastAct) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        tracing::error!("cannot watch for signals");
        return;
    };
    loop {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        let first = sender.send_replace(true);
        if first || !draining.load(Ordering::SeqCst) {
            if let Ok(last_act) = last_act.lock() {
                last_act.iter().for_each(|act| act());
            }
            oclaw::table::discard_unfinished();
            #[cfg(feature = "torch")]
            oclaw::train::discard_unfinished();
            report::leave(130);
        }
    }
}

fn install_logger(verbose: u8) {
    use tracing_subscriber::EnvFilter;
    let level = match verbose {
        0 => "warn",
        1 => "oclaw=info,warn",
        _ => "oclaw=debug,info",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}

fn print_settings(command: &str, settings: &[Setting]) -> anyhow::Result<()> {
    let mut text = format!("# oclaw {command}\n");
    let width = settings.iter().map(|setting| setting.name.len()).max().unwrap_or_default();
    for Setting { name, value, origin } in settings {
        text.push_str(&format!("{name:width$} = {value}  # {origin}\n"));
    }
    std::io::stdout().write_all(text.as_bytes()).printed()?;
    Ok(())
}

/// The error of a command that this build cannot do.
#[cfg_attr(
    feature = "torch",
    expect(dead_code, reason = "only a build without torch lacks anything")
)]
pub(crate) fn needs_torch(what: &str) -> anyhow::Error {
    Failure::usage(format!("{what} needs the `torch` feature, which this build lacks"))
        .hint("build with `cargo build --release` (default features)")
        .into()
}
