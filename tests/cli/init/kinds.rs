//! Files of every kind pass `oclaw check`.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use super::{KINDS, written};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw;

/// Runs `oclaw check`, which must find nothing wrong.
fn checked(folder: &Path, flags: &[&str]) -> Vec<Value> {
    let output = oclaw()
        .args(["check", "--json"])
        .args(flags)
        .envs([("OCLAW_JUDGE_KEY", "k"), ("OCLAW_HINT_KEY", "k")])
        .env("PATH", format!("{}:/usr/bin:/bin", folder.join("bin").display()))
        .current_dir(folder)
        .assert()
        .get_output()
        .clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn files_of_every_kind_pass_the_check() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let text = written(folder.path(), kind);
        checked(folder.path(), &["--offline"]);
        // So they do with everything that is switched off, but for what leaves
        // stages out, and for the files of keys.
        let lines = text.lines().map(|line| match line.strip_prefix('#') {
            Some(bare) if !bare.starts_with(' ') && bare.contains(" = ") => bare,
            _ => line,
        });
        let all: Vec<&str> = lines.filter(|line| !line.starts_with("without")).collect();
        fs::write(folder.path().join("oclaw.toml"), all.join("\n")).unwrap();
        for file in ["clients.keys", "gateway.key"] {
            fs::write(folder.path().join(file), "me secret\n").unwrap();
        }
        checked(folder.path(), &["--offline"]);
    }
}

/// Writes a file of a kind whose ports are free ones, and a `python3` on the path.
fn bench(kind: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut text = written(folder.path(), kind);
    // Held together, so that they differ.
    let ports = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    for (number, port) in ["30000", "30001", "30002"].iter().zip(&ports) {
        text = text.replace(number, &port.local_addr().unwrap().port().to_string());
    }
    fs::write(folder.path().join("oclaw.toml"), text).unwrap();
    let bin = folder.path().join("bin");
    fs::create_dir(&bin).unwrap();
    fs::write(bin.join("python3"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(bin.join("python3"), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Tells how often each check found all well.
fn well(findings: &[Value], check: &str) -> usize {
    findings.iter().filter(|it| it["check"] == check && it["result"] == "ok").count()
}

#[test]
fn one_machine_passes_as_a_whole() {
    let folder = bench("embedded");
    let findings = checked(folder.path(), &[]);
    assert_eq!(["port", "disk", "scheduler"].map(|check| well(&findings, check)), [2, 1, 1]);
}

#[test]
fn a_node_passes_as_a_whole_where_it_has_its_devices() {
    let folder = bench("node");
    let findings = checked(folder.path(), &["--devices", "8"]);
    let found = ["devices", "program", "port", "tokenizer"].map(|check| well(&findings, check));
    assert_eq!(found, [1, 2, 3, 1]);
    // Counted, there are fewer.
    let mut command = oclaw();
    let fewer = command.args(["check", "--devices", "7"]).current_dir(folder.path()).assert();
    assert_eq!(fewer.get_output().status.code(), Some(2));
}

#[test]
fn a_gateway_passes_as_a_whole_where_it_answers() {
    let folder = bench("gateway");
    let gateway = FakeEngine::start();
    let models = json!({"object": "list", "data": [{"id": "some-model"}, {"id": "other"}]});
    gateway.on("/v1/models", [Reply::json(200, models)]);
    let path = folder.path().join("oclaw.toml");
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.matches("https://gateway.example/v1").count(), 2, "{text}");
    let url = format!("{}/v1", gateway.url());
    fs::write(&path, text.replace("https://gateway.example/v1", &url)).unwrap();
    let findings = checked(folder.path(), &[]);
    assert_eq!(well(&findings, "engine"), 1, "{findings:#?}");
    let seen = gateway.seen();
    assert!(seen.iter().any(|seen| seen.authorization.as_deref() == Some("Bearer k")));
}
