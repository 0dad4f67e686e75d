//! What of a loop depends on the machine: devices, programs, ports, the disk, the
//! scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::pipeline::{self, Identity, Origin, Ray, Slurm, Status};

use super::finding::Finding;
use super::setup::Setup;
use crate::embedded;
use crate::files::told;
use crate::report::Kind;

/// Policies beside those that are kept while one is written: it, and its state.
const STATES: u64 = 3;
/// How long an object store may take to answer.
const STORE_PATIENCE: Duration = Duration::from_secs(20);
/// What an engine inside `oclaw serve` is called.
const INSIDE: &str = "serve's engine";
const GIB: f64 = (1u64 << 30) as f64;

/// Looks for the devices that are asked for; for so many if it is told. Without
/// looking, whatever is named is there.
pub(super) fn devices(
    setup: &Setup,
    (count, looks): (Option<u32>, bool),
    findings: &mut Vec<Finding>,
) {
    let processes = setup.plan.processes.values();
    let engines = setup.plan.engines.values().map(|engine| &engine.process);
    let named: BTreeSet<u32> =
        processes.chain(engines).flat_map(|process| process.gpus.iter().copied()).collect();
    let present = match (count, looks) {
        (count, true) => crate::devices::present(count),
        (Some(count), false) => (0..count).collect(),
        (None, false) => named.clone(),
    };
    findings.push(match setup.plan.check_devices(&present, &setup.without) {
        Ok(()) if named.is_empty() => Finding::ok("devices", "gpus", "none is asked for"),
        Ok(()) if setup.plan.scheduler.kind != pipeline::Kind::Local => {
            Finding::ok("devices", "gpus", "the scheduler gives them")
        }
        Ok(()) => {
            let named: Vec<String> = named.iter().map(u32::to_string).collect();
            Finding::ok("devices", "gpus", format!("{}: each for one process", named.join(", ")))
        }
        Err(error) => Finding::error("devices", "gpus", error).remedy(
            "give each process devices of its own; `--devices N` checks for another machine",
        ),
    });
}

/// Looks for the programs of engines that are commands.
pub(super) fn programs(setup: &Setup, findings: &mut Vec<Finding>) {
    for (name, engine) in &setup.plan.engines {
        let Origin::Command(words) = &engine.origin else { continue };
        let Some(program) = words.first() else { continue };
        let subject = format!("[engines.{name}] command");
        findings.push(match found(program) {
            Some(path) => Finding::ok("program", subject, path.display().to_string()),
            None => Finding::fail("program", subject, format!("there is no `{program}`"))
                .remedy("install it, or name it with its path"),
        });
    }
}

fn found(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|path| path.is_file());
    }
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Looks whether the addresses that the loop will listen at are free.
pub(super) fn ports(setup: &Setup, findings: &mut Vec<Finding>) {
    let mut wanted: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut want = |address: String, who: &str| {
        wanted.entry(address).or_default().push(who.to_owned());
    };
    for (name, address) in setup.with("listen").filter(|(_, address)| !address.ends_with(":0")) {
        want(address, name);
    }
    if let Some(address) = &setup.listen {
        want(address.clone(), "loop");
    }
    if setup.value("serve", "model").is_some()
        && let Some(address) = setup.value("serve", "engine-listen")
    {
        want(address, INSIDE);
    }
    for (name, engine) in &setup.plan.engines {
        let host = engine.url.split("://").nth(1).and_then(|rest| rest.split('/').next());
        if let (Origin::Command(_), Some(host)) = (&engine.origin, host) {
            want(host.to_owned(), &format!("engine-{name}"));
        }
    }
    for (address, who) in wanted {
        findings.push(port(setup, &address, &who));
    }
}

fn port(setup: &Setup, address: &str, who: &[String]) -> Finding {
    let subject = format!("{address} for {}", who.join(", "));
    if who.len() > 1 {
        return Finding::fail("port", subject, "two processes cannot have one")
            .remedy("give each a port of its own");
    }
    let addresses: Vec<SocketAddr> = match address.to_socket_addrs() {
        Ok(found) => found.collect(),
        Err(error) => return Finding::fail("port", subject, format!("no such address: {error}")),
    };
    match TcpListener::bind(addresses.as_slice()) {
        Ok(_) => Finding::ok("port", subject, "free"),
        Err(error) => match is_ours(setup, &who.concat()) {
            true => {
                Finding::warn("port", subject, format!("{error}: by a loop that runs already?"))
                    .remedy("`oclaw loop --status` says what runs")
            }
            false => Finding::fail("port", subject, error.to_string())
                .because(Kind::Failed)
                .remedy("choose another, or end what listens there"),
        },
    }
}

/// Returns whether a process of this run may be what listens: one that lives. Records stay
/// when processes have ended.
fn is_ours(setup: &Setup, who: &str) -> bool {
    let process = match who {
        // The loop itself has no record among those of its processes.
        "loop" => {
            let kept = Status::kept(&setup.run).and_then(|status| status.supervisor);
            return kept.as_ref().is_some_and(Identity::lives);
        }
        INSIDE => "serve",
        process => process,
    };
    let record = std::fs::read(setup.run.state().join(format!("{process}.process.json")));
    let known = record.ok().and_then(|text| serde_json::from_slice::<Identity>(&text).ok());
    known.as_ref().is_some_and(Identity::lives)
}

/// Looks whether policies of this size will fit onto the disk.
pub(super) fn disk(setup: &Setup, sizes: Option<(u64, u64)>, findings: &mut Vec<Finding>) {
    let folder = &setup.run.folder;
    let subject = folder.display().to_string();
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
    let Some(there) = absolute.ancestors().find(|folder| folder.is_dir()) else { return };
    let Some(free) = free(there) else {
        findings.push(Finding::warn("disk", subject, "nobody says how much is free"));
        return;
    };
    let keep: u64 = setup.value("train", "keep").and_then(|keep| keep.parse().ok()).unwrap_or(6);
    let (policy, state) = sizes.unwrap_or((0, 0));
    let least = policy + state;
    let most = policy.saturating_mul(keep.saturating_add(1)).saturating_add(state * STATES);
    let figures =
        format!("{:.1} GiB free, {:.1} GiB wanted at most", free as f64 / GIB, most as f64 / GIB);
    let remedy = "lower `[train] keep`, or put `[loop] run` onto a larger disk";
    findings.push(match free {
        free if free < least => {
            Finding::fail("disk", subject, figures).because(Kind::Failed).remedy(remedy)
        }
        free if free < most => Finding::warn("disk", subject, figures).remedy(remedy),
        _ => Finding::ok("disk", subject, figures),
    });
}

/// Returns the bytes that are free where a folder is.
fn free(folder: &Path) -> Option<u64> {
    let path = CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut figures = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    #[expect(unsafe_code, reason = "std does not tell how full a disk is")]
    // SAFETY: the path ends with a zero, and the figures are read only if the call
    // has filled them in.
    let figures = unsafe {
        match libc::statvfs(path.as_ptr(), figures.as_mut_ptr()) {
            0 => figures.assume_init(),
            _ => return None,
        }
    };
    Some(figures.f_bavail.saturating_mul(figures.f_frsize))
}

/// Asks the scheduler how it is.
pub(super) async fn scheduler(setup: &Setup, findings: &mut Vec<Finding>) {
    let scheduler = &setup.plan.scheduler;
    findings.push(match scheduler.kind {
        pipeline::Kind::Local => Finding::ok("scheduler", "local", "this machine"),
        pipeline::Kind::Ray => match &scheduler.address {
            Some(address) => match ray(address).await {
                Ok(version) => {
                    Finding::ok("scheduler", "ray", format!("Ray {version} at {}", told(address)))
                }
                Err(error) => away("ray", error),
            },
            None => Finding::fail("scheduler", "ray", "`[scheduler]` has no `address`")
                .remedy("give `http://HEAD:8265`"),
        },
        pipeline::Kind::Slurm => {
            let mut slurm = Slurm::new(None, Vec::new(), "check");
            match slurm.version().await {
                Ok(version) => Finding::ok("scheduler", "slurm", version),
                Err(error) => away("slurm", error.into()),
            }
        }
    });
}

async fn ray(address: &str) -> anyhow::Result<String> {
    let token = embedded::key("loop", None)?;
    Ok(Ray::new(address, "check", token.as_ref())?.version().await?)
}

fn away(subject: &str, error: anyhow::Error) -> Finding {
    let finding = Finding::error("scheduler", subject, error);
    match finding.remedy {
        Some(_) => finding,
        None => finding.remedy("start it, or `[scheduler] kind = \"local\"`"),
    }
}

/// Asks the object store by which the stages meet for its folder.
pub(super) async fn store(setup: &Setup, findings: &mut Vec<Finding>) {
    let Some(url) = &setup.run.store else { return };
    let asked = async {
        if let Some(store) = crate::stores::open(Path::new(url))? {
            store.list().await?;
        }
        anyhow::Ok(())
    };
    findings.push(match tokio::time::timeout(STORE_PATIENCE, asked).await {
        Ok(Ok(())) => Finding::ok("store", url, "answers, and lets us look"),
        Ok(Err(error)) => Finding::error("store", url, error),
        Err(_) => {
            let seconds = STORE_PATIENCE.as_secs();
            let finding = Finding::fail("store", url, format!("no answer within {seconds} s"));
            finding.because(Kind::Engine)
        }
    });
}
