//! Devices, programs, ports, the disk and the scheduler.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use super::{Bench, free_port};

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
    // What this loop left running may be there.
    fs::create_dir_all(bench.path().join("run/state")).unwrap();
    fs::write(bench.path().join("run/state/serve.process.json"), "{}").unwrap();
    bench.check(&bench.well(), &[]).says(3, "port", "warn", &["a loop that runs already"]);
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

#[test]
fn a_scheduler_must_answer() {
    let bench = Bench::new();
    let check = |section: &str, env: &[(&str, &str)]| {
        let text = format!("{}[scheduler]\n{section}", bench.well());
        bench.check_with(&text, &[], env)
    };
    let ray = |port: u16| format!("kind = \"ray\"\naddress = \"http://127.0.0.1:{port}\"\n");
    check(&ray(free_port()), &[]).says(4, "scheduler", "fail", &["ray", "start it"]);
    let head = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = check(&ray(head.local_addr().unwrap().port()), &[]);
    there.says(0, "scheduler", "ok", &["ray", "answers"]);

    let slurm = "kind = \"slurm\"\n";
    let bin = bench.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let path = [("PATH", bin.to_str().unwrap())];
    check(slurm, &path).says(4, "scheduler", "fail", &["`sbatch`"]);
    fs::write(bin.join("sbatch"), "#!/bin/sh\necho slurm 24.05.1\n").unwrap();
    fs::set_permissions(bin.join("sbatch"), fs::Permissions::from_mode(0o755)).unwrap();
    check(slurm, &path).says(0, "scheduler", "ok", &["slurm 24.05.1"]);
}
