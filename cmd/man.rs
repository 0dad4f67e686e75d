//! `oclaw man` and `oclaw completions`: the manual and the shell's help, made
//! from the same flags that the parser reads.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::Cli;
use crate::common::Context;
use crate::files::write_whole;
use crate::report::{Exit, Failure};

/// Print the manual page of a command
///
/// Standard output gets the page in roff, for `man -l -`; with `--folder` every
/// page is written as FOLDER/oclaw.1, FOLDER/oclaw-judge.1 and so on. The
/// repository's man/ is made that way, and a test holds it to it.
///
///     oclaw man judge | man -l -
///     oclaw man --folder ~/.local/share/man/man1
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The command; without it the page of oclaw itself
    #[arg(value_name = "COMMAND", conflicts_with = "folder")]
    command: Option<String>,
    /// Write every page into this folder
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// Print a completion script for a shell
///
///     oclaw completions bash > ~/.local/share/bash-completion/completions/oclaw
///     oclaw completions zsh > "${fpath[1]}/_oclaw"
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let program = built();
    let Some(folder) = args.folder else {
        let command = match &args.command {
            None => program,
            Some(name) => match page_of(&program, name) {
                Some(command) => command,
                None => {
                    let failure = Failure::usage(format!("there is no command `{name}`"));
                    return Err(failure.hint("`oclaw --help` lists them").into());
                }
            },
        };
        io::stdout().lock().write_all(&page(command)?)?;
        return Ok(Exit::Done);
    };
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make the folder `{}`", folder.display()))?;
    let mut count = 0;
    for command in pages(&program) {
        write(&folder, command)?;
        count += 1;
    }
    context.say(format_args!("{}: {count} pages", folder.display()));
    Ok(Exit::Done)
}

pub(crate) fn completions(args: Completions, _: &Context) -> anyhow::Result<Exit> {
    // Into memory first: the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "oclaw", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(Exit::Done)
}

/// The program with its names and shared flags in every subcommand.
fn built() -> Command {
    let mut program = Cli::command().disable_help_subcommand(true);
    program.build();
    program
}

fn write(folder: &Path, command: Command) -> anyhow::Result<()> {
    write_whole(&folder.join(format!("{}.1", name(&command))), &page(command)?)
}

/// Every page: the program's and each command's.
fn pages(program: &Command) -> impl Iterator<Item = Command> {
    let commands: Vec<Command> =
        program.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    std::iter::once(program.clone()).chain(commands)
}

fn page_of(program: &Command, name: &str) -> Option<Command> {
    pages(program).skip(1).find(|command| command.get_name() == name)
}

/// `oclaw`, or `oclaw-judge`: the name of the page.
fn name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

fn page(command: Command) -> io::Result<Vec<u8>> {
    let own = name(&command);
    let mut roff = Vec::new();
    let section = own.strip_prefix("oclaw-").map(str::to_owned);
    // No date: a page changes when the program does, and not otherwise.
    let version = concat!("oclaw ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command).title(own.to_uppercase()).source(version).manual("oclaw manual");
    man.render(&mut roff)?;
    writeln!(roff, ".SH SETTINGS\n{}", settings(section.as_deref()))?;
    writeln!(roff, ".SH \"EXIT STATUS\"\n{EXIT_STATUS}")?;
    writeln!(roff, ".SH \"SEE ALSO\"\n.BR oclaw (1)")?;
    Ok(roff)
}

fn settings(section: Option<&str>) -> String {
    let Some(section) = section else {
        return "Each option of a command is also a variable of the environment, \
                .B OCLAW_JUDGE_VOTES\nfor \\fBjudge \\-\\-votes\\fR, and a key of the command's section in the\n\
                \\fB\\-\\-config\\fR file. The command line wins over the environment, the environment over\n\
                the file, the file over the default."
            .replace(", .B", ",\n.B");
    };
    let variable = section.replace('-', "_").to_uppercase();
    format!(
        "Each option is also a variable of the environment, \\fBOCLAW_{variable}_\\fIOPTION\\fR in\n\
         capitals with underscores, and a key of the section \\fB[{section}]\\fR of the\n\
         \\fB\\-\\-config\\fR file. The command line wins over the environment, the environment over\n\
         the file, the file over the default. \\fB\\-\\-show\\-settings\\fR prints the outcome."
    )
}

const EXIT_STATUS: &str = "\
.TP\n\\fB0\\fR\ndone; also when the reader of our output went away, or a server was drained
.TP\n\\fB1\\fR\nfailed: input, disk, a busy port
.TP\n\\fB2\\fR\nwrong usage or settings
.TP\n\\fB3\\fR\nfinished, but not all is well: an annotation failed, a budget ended, findings, a difference, a rejection
.TP\n\\fB4\\fR\nan engine is not there or not able, after retries
.TP\n\\fB101\\fR\na bug of oclaw
.TP\n\\fB130\\fR\ninterrupted; nothing half-written is left under a final name";
