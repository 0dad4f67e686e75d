//! `oclaw check`: whether the loop of a configuration file can run here.

mod engines;
mod finding;
mod machine;
mod models;
mod setup;

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use finding::Finding;
use oclaw::pipeline::Wishes;
use setup::Setup;

use crate::common::{Context, Printing as _};
use crate::init::FILE;
use crate::report::Exit;

/// Test whether the loop of a configuration file can run here
///
/// One line per check: the settings (syntax, unknown keys, values, whether every
/// stage has whom it needs), the devices (there, and each for one process), the
/// models (whole, of a family that is computed here), the tokenizers (whoever shares
/// ids with the policy must have its own), the engines that others run (reached, and
/// able to do what is wanted), the programs of those that the loop starts, keys,
/// ports, the object store, the disk, the scheduler. Nothing is started, sent or written.
///
/// `--offline` looks at nothing but the file, the models and the keys' files: to
/// check here what is to run elsewhere. `--devices 8` takes it that there are eight.
///
/// Exit code 0: all is well; 3: the loop can run, but look at the warnings; 2: the
/// settings ask for what cannot be; 1: this machine has not the place for it (a
/// broken model, a busy port, a full disk); 4: an engine, the object store or the scheduler is away.
/// Of several the first in the order 2, 1, 4, 3.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The file [default: that of --config, or oclaw.toml]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print one JSON object per check
    #[arg(long)]
    json: bool,
    /// Look at nothing outside the file, but for models and keys
    #[arg(long)]
    offline: bool,
    /// Take it that there are so many devices
    #[arg(long, value_name = "N")]
    devices: Option<u32>,
}

/// Checks.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let path = place(args.file.clone(), context);
    conclude(&look(&path, (&args, None), context), &args, context)
}

/// Finds the file.
pub(crate) fn place(named: Option<PathBuf>, context: &Context) -> PathBuf {
    named.or_else(|| context.config.clone()).unwrap_or_else(|| PathBuf::from(FILE))
}

fn conclude(findings: &[Finding], args: &Args, context: &Context) -> anyhow::Result<Exit> {
    let mut out = BufWriter::new(io::stdout().lock());
    match args.json {
        true => finding::json(&mut out, findings),
        false => finding::table(&mut out, findings),
    }
    .and_then(|()| out.flush())
    .printed()?;
    if args.offline {
        context.say(
            "offline: engines, devices, programs, ports, object store, disk and scheduler were not looked at",
        );
    }
    finding::end(findings)
}

/// Checks for `oclaw loop --dry-run`, whose flags say what is wanted, and where it would
/// listen.
pub(crate) fn of_loop(
    (path, devices): (&Path, Option<u32>),
    told: (Wishes, Option<String>),
    context: &Context,
) -> anyhow::Result<Exit> {
    let args = Args { file: None, json: false, offline: false, devices };
    conclude(&look(path, (&args, Some(told)), context), &args, context)
}

fn look(
    path: &Path,
    (args, told): (&Args, Option<(Wishes, Option<String>)>),
    context: &Context,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(setup) = setup::read(path, told, &mut findings) else { return findings };
    stages(&setup, &mut findings);
    window(&setup, &mut findings);
    machine::devices(&setup, (args.devices, !args.offline), &mut findings);
    let sizes = models::models(&setup, &mut findings);
    engines::keys(&setup, &mut findings);
    if args.offline {
        models::tokenizers(&setup, &[], &mut findings);
        return findings;
    }
    machine::programs(&setup, &mut findings);
    let told = context.block_on(engines::engines(&setup, &mut findings));
    models::tokenizers(&setup, &told, &mut findings);
    machine::ports(&setup, &mut findings);
    context.block_on(machine::store(&setup, &mut findings));
    machine::disk(&setup, sizes, &mut findings);
    context.block_on(machine::scheduler(&setup, &mut findings));
    findings
}

/// Looks whether what waits for a window of training is still taken then.
fn window(setup: &Setup, findings: &mut Vec<Finding>) {
    let waits = ["when-idle", "hours"].iter().any(|key| setup.value("train", key).is_some());
    if waits && !setup.tells_staleness {
        let found = "turns of a whole window have one version; after 4 steps the others are \
                     refused as stale";
        let finding = Finding::warn("staleness", "[train]", found);
        findings.push(finding.remedy("set `[train] max-staleness`"));
    }
}

/// Looks whether the estimator has what it stands on.
fn stages(setup: &Setup, findings: &mut Vec<Finding>) {
    // Nothing is known of a stage whose settings are faulty: that is told already.
    let made = setup.value("advantage", "estimator");
    // Told none, `train` takes the one of the table.
    let trained = setup.value("train", "estimator").or_else(|| made.clone());
    let Some(trained) = trained.filter(|_| setup.knows("train")) else { return };
    if let Some(made) = made.filter(|made| setup.runs("advantage") && *made != trained) {
        let found = format!("`advantage` has `{made}`, `train` has `{trained}`");
        let finding = Finding::warn("estimator", "[train]", found);
        findings.push(finding.remedy("`train` decides: write the same in both"));
    }
    // That nobody who teaches is left out is held by the loop's own reading of the file.
    let student = ["model", "policy", "student"];
    let student = student.iter().any(|key| setup.value("teacher-lp", key).is_some());
    let topk = setup.value("teacher-lp", "topk").map_or(student, |topk| topk != "0");
    findings.push(match trained.as_str() {
        "hybrid" | "topk-kl" if !topk => {
            let found = format!("`{trained}` needs the likeliest tokens of the teacher");
            Finding::fail("estimator", "[train]", found).remedy("`[teacher-lp] topk = 4`")
        }
        _ => Finding::ok("estimator", "[train]", trained),
    });
}
