//! Stages over an object store: against a store that fails as it is told, and,
//! where `.ci/run` has installed one, against a real S3-compatible server.

pub(super) mod real;
#[cfg(feature = "torch")]
mod policies;
mod ship;

use std::path::Path;

use oclaw::store::{Address, Store};
use oclaw::table::{Format, read_turns};
use oclaw::trajectory::turn::Micros;
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

use super::follow::Running;
use crate::forge::{captured, write};
use crate::harness::fake_s3::FakeS3;
use crate::harness::oclaw;

/// What a process finds in its environment to reach a store.
pub(super) fn settings(endpoint: &str) -> Vec<(String, String)> {
    let settings = [
        ("AWS_ENDPOINT", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "key-id"),
        ("AWS_SECRET_ACCESS_KEY", "very-secret"),
    ];
    settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
}

/// A bucket, and a folder of this machine.
struct Cloud {
    endpoint: String,
    here: tempfile::TempDir,
}

impl Cloud {
    fn new(endpoint: &str) -> Self {
        Self { endpoint: endpoint.to_owned(), here: tempfile::tempdir().unwrap() }
    }

    fn settings(&self) -> Vec<(String, String)> {
        settings(&self.endpoint)
    }

    fn command(&self, arguments: &[&str]) -> assert_cmd::Command {
        let mut command = oclaw();
        command.args(arguments).arg("--object-cache").arg(self.here.path().join("cache"));
        command.envs(self.settings()).env("NO_PROXY", "127.0.0.1").current_dir(self.here.path());
        command
    }

    /// Follows one folder of the bucket into another.
    fn follow(
        &self,
        stage: &str,
        (from, to): (&str, &str),
        further: &[&str],
    ) -> assert_cmd::Command {
        let (from, to) = (format!("s3://bucket/{from}"), format!("s3://bucket/{to}"));
        let out = if stage == "train" { "--out" } else { "-o" };
        let mut command = self.command(&[stage, "--poll", "1ms", "--follow", &from, out, &to]);
        command.args(further);
        command
    }

    fn shard(&self, session: &str, second: i64, turns: u32) -> Vec<u8> {
        let turn = |number: u32| Turn {
            created_at: Micros((second + i64::from(number)) * 1_000_000),
            next_state: Some(json!([{"role": "user", "content": "No, wrong."}]).to_string()),
            ..captured(session, number)
        };
        let turns: Vec<_> = (1..=turns).map(turn).collect();
        let path = self.here.path().join("made.parquet");
        write(&path, Format::Parquet, &[Writer::Serve], &turns);
        std::fs::read(path).unwrap()
    }

    fn store(&self, folder: &str) -> Store {
        let url = format!("s3://bucket/{folder}");
        let address = Address::of(Path::new(&url)).unwrap().unwrap();
        Store::open(address, &self.settings()).unwrap()
    }
}

fn talk(output: &std::process::Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn read(cloud: &Cloud, bytes: &[u8]) -> (Vec<Turn>, String) {
    let path = cloud.here.path().join("read.parquet");
    std::fs::write(&path, bytes).unwrap();
    let source = oclaw::table::Source::open(std::slice::from_ref(&path)).unwrap();
    let lines = serde_json::to_string(&source.provenance().lines).unwrap();
    (read_turns(&[path]).unwrap(), lines)
}

#[test]
fn shards_of_a_store_are_done_once() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.put("turns/b.parquet", cloud.shard("b", 100, 2));
    fake.put("turns/a.parquet", cloud.shard("a", 200, 3));
    let whole = cloud.shard("c", 300, 1);
    fake.put("turns/c.parquet", whole[..whole.len() - 9].to_vec());
    let further = ["--rules", "--once", "--shard-tries", "1"];
    let mut judge = cloud.follow("judge", ("turns", "judged"), &further);
    let ran = judge.assert().code(3);
    let words = talk(ran.get_output());
    let (first, second) = (words.find("b.parquet: 2 rows"), words.find("a.parquet: 3 rows"));
    assert!(first.unwrap() < second.unwrap(), "{words}");
    assert!(words.contains("c.parquet: `s3://bucket/turns/c.parquet` is cut short"), "{words}");
    assert!(words.ends_with("shards 2 listed as failed 1"), "{words}");
    let mut names = fake.names();
    names.retain(|name| name.starts_with("judged/"));
    assert_eq!(names, ["judged/a.parquet", "judged/b.parquet", "judged/failed/c.json"]);
    let (turns, lines) = read(&cloud, &fake.get("judged/a.parquet").unwrap());
    assert_eq!(turns.iter().filter(|turn| turn.score == Some(-1.0)).count(), 3);
    assert!(lines.contains("s3://bucket/turns/a.parquet "), "{lines}");
    assert!(!lines.contains("very-secret") && !lines.contains("cache/objects"), "{lines}");
    // Nothing is done twice, and what is written is not written again.
    let before = fake.get("judged/a.parquet").unwrap();
    fake.remove("turns/c.parquet");
    let again = cloud.follow("judge", ("turns", "judged"), &further).assert().success();
    assert!(talk(again.get_output()).ends_with("shards 0"));
    assert_eq!(fake.get("judged/a.parquet").unwrap(), before);
    // From a folder of this machine into a store, and the other way.
    let here = cloud.here.path().join("here");
    let grpo = ["--estimator", "grpo"];
    let words = ["advantage", "--follow", "s3://bucket/judged", "-o", "here", "--once"];
    cloud.command(&words).args(grpo).assert().success();
    assert!(here.join("a.parquet").is_file() && here.join("b.parquet").is_file());
    cloud
        .command(&["judge", "--follow", "here", "-o", "s3://bucket/up", "--rules", "--once"])
        .assert()
        .code(3);
}

#[test]
fn a_store_that_is_away_is_waited_for() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.say(503);
    let mut judging = Running::start(&cloud.follow("judge", ("turns", "judged"), &["--rules"]));
    let line = judging.hears("the store is away");
    assert!(
        line.starts_with("`s3://bucket/judged/`") || line.starts_with("`s3://bucket/judged`"),
        "{line}"
    );
    assert!(line.ends_with(": waiting"), "{line}");
    fake.put("turns/a.parquet", cloud.shard("a", 100, 1));
    fake.say(0);
    judging.hears("a.parquet: 1 rows, 1 noted");
    // The answer to a write is lost: it is done, once.
    fake.lose(1);
    fake.put("turns/b.parquet", cloud.shard("b", 200, 1));
    fake.put("turns/c.parquet", cloud.shard("c", 300, 1));
    judging.hears("c.parquet: 1 rows");
    let (code, words) = judging.stop();
    assert_eq!(code, Some(0), "{words}");
    assert!(fake.get("judged/b.parquet").is_some());
    assert!(!fake.names().iter().any(|name| name.contains("failed")), "{:?}", fake.names());
    // Where nobody waits it is no fault of ours, and worth another try.
    fake.say(503);
    let mut once = cloud.follow("judge", ("turns", "judged"), &["--rules", "--once"]);
    once.assert().code(4);
    // What the store refuses is told at once.
    fake.say(403);
    let mut refused = cloud.follow("judge", ("turns", "judged"), &["--rules"]);
    let ran = refused.assert().code(2);
    let words = talk(ran.get_output());
    assert!(words.contains("the store refuses it"), "{words}");
    assert!(words.contains("hint: keys, region and endpoint come from the environment"), "{words}");
}

/// A store that takes a request and never answers is not waited for when it is to end.
#[test]
fn a_store_that_hangs_holds_up_no_end() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.put("turns/a.parquet", cloud.shard("a", 100, 1));
    let mut judging = Running::start(&cloud.follow("judge", ("turns", "judged"), &["--rules"]));
    judging.hears("a.parquet: 1 rows, 1 noted");
    fake.hang();
    let (code, words) = judging.stop();
    assert_eq!(code, Some(0), "{words}");
}

#[test]
fn tables_of_a_store_are_read_like_others() {
    let fake = FakeS3::start();
    let cloud = Cloud::new(&fake.endpoint);
    fake.put("turns/a.parquet", cloud.shard("a", 100, 2));
    fake.put("turns/b.parquet", cloud.shard("b", 200, 1));
    let lint = |url: &str| {
        let ran = cloud.command(&["lint", url]).assert().success();
        talk(ran.get_output())
    };
    assert!(lint("s3://bucket/turns/a.parquet").contains("2 rows, 0 findings"));
    assert!(lint("s3://bucket/turns").contains("3 rows, 0 findings"));
    cloud.command(&["view", "s3://bucket/turns/b.parquet"]).assert().success();
    cloud.command(&["stats", "s3://bucket/turns"]).assert().success();
    cloud
        .command(&["judge", "--rules", "s3://bucket/turns/a.parquet", "-o", "a.parquet"])
        .assert()
        .success();
    // A copy is read again as long as it is the same.
    let reads = || fake.asked().iter().filter(|it| it.starts_with("GET /bucket/turns/b")).count();
    let before = reads();
    lint("s3://bucket/turns/b.parquet");
    assert_eq!(reads(), before);
    for (arguments, code, words) in [
        (["lint", "s3://bucket/none"].as_slice(), 1, "no such object, and no `*.parquet` below it"),
        (&["lint", "s3://me:very-secret@bucket/x"], 2, "`s3://…@bucket/x`: keys are no part"),
        (
            &["judge", "--rules", "s3://bucket/turns", "-o", "s3://bucket/o"],
            2,
            "it takes shards of",
        ),
        (
            &["judge", "--rules", "--follow", "s3://bucket/x", "-o", "s3://bucket/x/"],
            2,
            "cannot be followed into itself",
        ),
    ] {
        let ran = cloud.command(arguments).assert().code(code);
        let said = talk(ran.get_output());
        assert!(said.contains(words), "{words}: {said}");
        assert!(!said.contains("very-secret"), "{said}");
    }
    fake.say(503);
    cloud.command(&["lint", "s3://bucket/turns"]).assert().code(4);
}
