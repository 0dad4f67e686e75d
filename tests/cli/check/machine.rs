//! Devices, programs, ports, the disk and the scheduler.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use oclaw::pipeline::{Identity, Run, Status};
use serde_json::json;

use super::{Bench, free_port};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::fake_s3::FakeS3;

#[test]
fn devices_are_there_and_each_for_one() {
    let bench = Bench::new();
    let well = bench.well().replace("[serve]", "gpus = [6, 7]\n[serve]");
    let train = |gpus: &str| format!("{well}[train]\ngpus = {gpus}\n");
    let check = |text: &str, words: &[&str]| bench.check(text, words);
    check(&train("[4, 5]"), &["--devices", "8"]).says(0, "devices", "ok", &["4, 5, 6, 7"]);
    let words = ["`[train]` has device 6 of `[engines.policy]`"];
    check(&train("[5, 6]"), &["--devices", "8"]).says(2, "devices", "fail", &words);
    check(&train("[5, 6]"), &["--offline"]).says(2, "devices", "fail", &words);
    let words = ["no device 7: there are 0, 1, 2, 3, 4, 5, 6"];
    check(&train("[5]"), &["--devices", "7"]).says(2, "devices", "fail", &words);
    check(&train("[5]"), &["--devices", "0"]).says(2, "devices", "fail", &["there is none"]);
}

#[test]
fn a_program_must_be_there() {
    let bench = Bench::new();
    let model = format!("model = {:?}\n", Bench::model().display().to_string());
    let train = format!("[train]\n{model}");
    let command = |program: &str| {
        let command = format!("command = [\"{program}\", \"x\"]\n");
        format!("{}{train}", bench.well().replacen(&model, &command, 1))
    };
    let words = ["[engines.policy]", "there is no `no-such-server`"];
    bench.check(&command("no-such-server"), &[]).says(2, "program", "fail", &words);
    bench.check(&command("sh"), &[]).says(0, "program", "ok", &["/sh"]);
}

#[test]
fn ports_are_free_and_each_for_one() {
    let bench = Bench::new();
    let taken = TcpListener::bind(("127.0.0.1", bench.front)).unwrap();
    let busy = bench.check(&bench.well(), &[]);
    busy.says(1, "port", "fail", &[&bench.front.to_string(), "serve", "choose another"]);
    // A record stays when its process has ended: another program is there.
    fs::create_dir_all(bench.path().join("run/state")).unwrap();
    let supervisor = Identity::of(std::process::id());
    let own = supervisor.clone().unwrap();
    let ended = Identity { started: own.started + 1, ..own.clone() };
    let record = |it: &Identity| {
        let Identity { pid, started, boot } = it;
        let record = json!({"id": "serve-1", "pid": pid, "started": started, "boot": boot});
        fs::write(bench.path().join("run/state/serve.process.json"), record.to_string()).unwrap();
    };
    record(&ended);
    let busy = bench.check(&bench.well(), &[]);
    busy.says(1, "port", "fail", &[&bench.front.to_string(), "serve", "choose another"]);
    // What this loop left running may be there.
    record(&own);
    bench.check(&bench.well(), &[]).says(3, "port", "warn", &["a loop that runs already"]);
    // The loop itself listens, too; a record of one that has ended says nothing.
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = own.local_addr().unwrap().to_string();
    let listening = format!("{}[loop]\nlisten = \"{address}\"\n", bench.well());
    bench.check(&listening, &[]).says(1, "port", "fail", &["for loop", "choose another"]);
    let run = Run::new(bench.path().join("run"));
    Status { supervisor, ..Status::default() }.keep(&run).unwrap();
    bench.check(&listening, &[]).says(3, "port", "warn", &["for loop", "that runs already"]);
    drop(taken);
    let both = bench.well().replace(&bench.front.to_string(), &bench.engine.to_string());
    bench.check(&both, &[]).says(2, "port", "fail", &["two processes", "engine-policy, serve"]);
}

#[test]
fn the_disk_must_hold_the_policies() {
    let bench = Bench::new();
    bench.check(&bench.well(), &[]).says(0, "disk", "ok", &["GiB free"]);
    let many = format!("{}[train]\nkeep = 1000000000000\n", bench.well());
    bench.check(&many, &[]).says(3, "disk", "warn", &["lower `[train] keep`"]);
}

/// A model that nobody has room for: its file says so, and has a hole for the rest.
#[test]
fn a_disk_that_cannot_hold_one_policy_fails() {
    let bench = Bench::new();
    let folder = bench.copy_model("huge");
    let weights: u64 = 3_000_000_000_000;
    let header = format!(
        "{{\"a\":{{\"dtype\":\"BF16\",\"shape\":[{weights}],\"data_offsets\":[0,{}]}}}}",
        weights * 2
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let length = bytes.len() as u64 + weights * 2;
    let path = folder.join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap();
    // The policy and the state of its optimiser: 10 bytes a weight.
    let words = ["GiB free, 78231.1 GiB wanted at most", "lower `[train] keep`"];
    let text = format!("{}[train]\nkeep = 1\n", bench.with_model(&folder));
    let outcome = bench.check(&text, &[]);
    let disk = outcome.findings.iter().find(|it| it["check"] == "disk").unwrap();
    outcome.says(1, "disk", "fail", &[]);
    let told = format!("{} {}", disk["found"].as_str().unwrap(), disk["remedy"].as_str().unwrap());
    assert!(words.iter().all(|word| told.contains(word)), "{told}");
}

/// Where nothing in /dev has their names, NVIDIA's own program lists them.
#[test]
fn devices_are_counted_by_nvidias_program() {
    let own = fs::read_dir("/dev").unwrap().any(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok())
    });
    if own {
        println!("skipped: this machine has devices of its own");
        return;
    }
    let bench = Bench::new();
    let bin = bench.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let listing = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-3f1b)\n\
                   GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77c0)\n";
    let program = format!("#!/bin/sh\n[ \"$*\" = -L ] && printf '{listing}'\n");
    fs::write(bin.join("nvidia-smi"), program).unwrap();
    fs::set_permissions(bin.join("nvidia-smi"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", bin.display());
    let check = |gpus: &str| {
        let text = format!("{}[train]\ngpus = {gpus}\n", bench.well());
        bench.check_with(&text, &[], &[("PATH", &path)])
    };
    check("[0, 1]").says(0, "devices", "ok", &["0, 1: each for one process"]);
    check("[2]").says(2, "devices", "fail", &["`[train]` has no device 2: there are 0, 1"]);
    // The loop counts them alike.
    fs::write(bench.path().join("oclaw.toml"), format!("{}[train]\ngpus = [2]\n", bench.well()))
        .unwrap();
    let mut command = crate::harness::oclaw();
    command.args(["loop", "oclaw.toml"]).env("PATH", &path).current_dir(bench.path());
    let output = command.assert().code(2).get_output().clone();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("`[train]` has no device 2: there are 0, 1"), "{said}");
}

#[test]
fn a_store_must_answer() {
    let (bench, fake) = (Bench::new(), FakeS3::start());
    let text = format!("{}[loop]\nstore = \"s3://bucket/run\"\n", bench.well());
    let settings = crate::cli::stores::settings(&fake.endpoint);
    let mut env: Vec<_> = settings.iter().map(|(name, value)| (&**name, &**value)).collect();
    env.push(("NO_PROXY", "127.0.0.1"));
    let check = || bench.check_with(&text, &[], &env);
    check().says(0, "store", "ok", &["s3://bucket/run", "answers"]);
    fake.say(503);
    check().says(4, "store", "fail", &["s3://bucket/run", "the store is away"]);
    fake.say(403);
    check().says(2, "store", "fail", &["the store refuses it", "come from the environment"]);
    let without = bench.well();
    let folder = format!("{without}[loop]\nstore = \"shared/run\"\n");
    bench.check(&folder, &[]).says(2, "settings", "fail", &["`store` is to be of an object store"]);
}

#[test]
fn a_scheduler_must_answer() {
    let bench = Bench::new();
    let check = |section: &str, env: &[(&str, &str)]| {
        let text = format!("{}[scheduler]\n{section}", bench.well());
        bench.check_with(&text, &[], env)
    };
    let ray = |url: &str| format!("kind = \"ray\"\naddress = \"{url}\"\n");
    let nobody = format!("http://127.0.0.1:{}", free_port());
    check(&ray(&nobody), &[]).says(4, "scheduler", "fail", &["ray", &nobody, "start it"]);
    check("kind = \"ray\"\n", &[]).says(2, "scheduler", "fail", &["has no `address`"]);
    // That something listens there is not enough: it has to be a head.
    let other = FakeEngine::start();
    check(&ray(&other.url()), &[]).says(4, "scheduler", "fail", &["ray", "status 404"]);
    other.on("/api/version", [Reply::json(200, json!({"version": "4", "ray_version": "2.60.0"}))]);
    let there = check(&ray(&other.url()), &[("OCLAW_LOOP_KEY", "t0ken")]);
    there.says(0, "scheduler", "ok", &["ray", "Ray 2.60.0 at"]);
    let asked = other.seen().pop().unwrap();
    assert_eq!(asked.authorization.as_deref(), Some("Bearer t0ken"));

    let slurm = "kind = \"slurm\"\n";
    let bin = bench.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let path = [("PATH", bin.to_str().unwrap())];
    check(slurm, &path).says(4, "scheduler", "fail", &["cannot run `sbatch`", "kind = \"local\""]);
    let put = |name: &str, script: &str| {
        fs::write(bin.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    put("sbatch", "echo slurm 24.05.1");
    // One of its commands is not all of them.
    check(slurm, &path).says(4, "scheduler", "fail", &["cannot run `squeue`"]);
    for name in ["sacct", "scancel"] {
        put(name, "echo slurm 24.05.1");
    }
    let away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)";
    put("squeue", &format!("[ \"$1\" = --version ] || {{ echo '{away}' >&2; exit 1; }}"));
    check(slurm, &path).says(4, "scheduler", "fail", &["`squeue`", away]);
    put("squeue", "exit 0");
    check(slurm, &path).says(0, "scheduler", "ok", &["slurm 24.05.1"]);
}
