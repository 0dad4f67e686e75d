//! What a loop does not begin, and what it gives up.

use std::fs;

use serde_json::json;

use super::super::stores::settings;
use super::Loop;
use crate::harness::fake_s3::FakeS3;
use crate::harness::oclaw;

/// Starts a loop that must be refused; returns its words.
fn refused(config: &str, further: &[&str]) -> String {
    let looped = Loop::new(config);
    let output = looped.command().args(further).assert().code(2);
    for folder in ["run", "s3:"] {
        assert!(!looped.path(folder).exists(), "nothing is made for nothing");
    }
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

const SERVE: &str = "[serve]\nengine = \"http://127.0.0.1:1\"\n";
const BARE: &str = "[loop]\nwithout = [\"judge\", \"hint\", \"teacher-lp\", \"advantage\", \
                    \"train\", \"sync-weights\"]\n";

#[test]
fn what_cannot_work_is_refused_before_anything_starts() {
    for (config, further, words) in [
        ("", &[][..], "nobody answers the chats: write `[serve] model = DIR`"),
        (SERVE, &[], "`judge` has nobody to ask"),
        (SERVE, &["--without", "jugde"], "`without`: no stage `jugde` to do without"),
        (SERVE, &["--without", "advantage"], "`train` needs `advantage`"),
        (SERVE, &["--without", "hint"], "`estimator = \"hybrid\"` needs `hint`"),
        (
            SERVE,
            &["--run", "s3://chats/run"],
            "`run` is to be a folder of a file system, not of an object store (`s3://`)",
        ),
        (SERVE, &["--log-size", "0"], "wanted at least 4KiB"),
        (SERVE, &["--store", "/shared"], "`store` is to be of an object store, as in `s3://"),
        (SERVE, &["--store", "s3://me:very-secret@chats/run"], "`s3://…@chats/run`: keys are no"),
        (
            "[serve]\nengine = \"http://127.0.0.1:1\"\nship = \"s3://chats/turns\"\n",
            &["--store", "s3://chats/run"],
            "`[serve] ship` and `[loop] store` both say where turns go: leave `ship` out",
        ),
        (
            "[serve]\nengine = \"http://127.0.0.1:1\"\nlisten = \"127.0.0.1:0\"\n",
            &[],
            "`[serve] listen` needs a port that stays",
        ),
        (
            "[serve]\nmodel = \"m\"\n[engines.a]\nmodel = \"m\"\n",
            &[],
            "`[serve]` has an engine of its own, and `[engines]` another for it",
        ),
        (
            "[serve]\nengine = \"http://127.0.0.1:1\"\n[train]\nout = \"p\"\n",
            &[],
            "`oclaw.toml` line 4: `[train] out` has no effect in a loop: policies go to `policy`",
        ),
        ("[engines.a]\nmodl = \"m\"\n", &[], "`oclaw.toml` line 2: no setting `modl`"),
        ("[loop]\ngrce = \"1s\"\n", &[], "`oclaw.toml` line 2: no setting `grce` in `[loop]`"),
        ("[loop]\nweight_sync_interval = 2\n", &[], "in `[loop]`; it is `weight-sync-interval`"),
        ("[loop]\ntrain-hours = [\"22-6\"]\n", &[], "wanted hours as in `22:00-06:00`"),
        (
            "[serve]\nmodel = \"m\"\n[judge]\nrules = \"\"\n[hint]\nfrom-feedback = true\n\
             [train]\ngpus = [1]\n[judge.env]\nA = \"b\"\n",
            &["--devices", "1"],
            "line 8: `[train]` has no device 1: there are 0",
        ),
    ] {
        let said = refused(config, further);
        assert!(said.contains(words), "{config}: {said}");
        assert!(!said.contains("very-secret"), "{said}");
    }
    let folder = tempfile::tempdir().unwrap();
    let output = oclaw().arg("loop").current_dir(folder.path()).assert().code(2);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    let words = "a loop needs a configuration: no `oclaw.toml` here\nhint: `oclaw init` writes one";
    assert!(said.contains(words), "{said}");
    fs::write(folder.path().join("oclaw.toml"), "[loop]\ngrce = \"1s\"\n").unwrap();
    let output = oclaw().arg("loop").current_dir(folder.path()).assert().code(2);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(said.contains("`oclaw.toml` line 2: no setting `grce`"), "{said}");
    let mut command = oclaw();
    let output = command.args(["loop", "--status"]).arg(folder.path()).assert().code(2);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(said.contains("is no run: it has no `turns`"), "{said}");
}

/// Others than those on this machine need a key.
#[test]
fn the_state_is_not_for_everybody() {
    let looped = Loop::new(&format!("{SERVE}{BARE}listen = \"0.0.0.0:0\"\n"));
    let output = looped.command().assert().code(2);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(said.contains("key"), "{said}");
}

/// Chats depend on serve: if that cannot work, nothing can.
#[test]
fn a_loop_whose_server_cannot_work_ends_and_says_so() {
    let config = format!(
        "{SERVE}listen = \"FRONT\"\nkey-file = \"absent\"\n{BARE}give-up = 2\nrestart-wait = \"10ms\"\n"
    );
    let looped = Loop::new(&config);
    let output = looped.command().timeout(super::PATIENCE).assert().code(1);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    for words in [
        "serve: ended with exit code 2: started again in 0.0 s",
        "cannot read the keys in `absent`",
        "serve: ended with exit code 2 for the second time: it is not started again",
        "`serve` cannot work, and chats depend on it",
        "hint: see `run/logs/serve.log`",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(fs::read_to_string(looped.path("run/logs/loop.log")).unwrap().contains("not started"));
}

/// A program that is not there will not be there the next time either.
#[test]
fn an_engine_that_does_not_exist_is_given_up() {
    let config = format!(
        "[engines.policy]\ncommand = [\"./no-such-engine\"]\nurl = \"http://ENGINE\"\n\
         [serve]\nlisten = \"FRONT\"\n{BARE}give-up = 3\nrestart-wait = \"10ms\"\n"
    );
    let looped = Loop::new(&config);
    let output = looped.command().timeout(super::PATIENCE).assert().code(1);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    let cannot = "engine-policy: cannot start `engine-policy` (`./no-such-engine`): ";
    assert_eq!(said.matches(cannot).count(), 3, "{said}");
    assert!(said.contains(": it is not tried again\n"), "{said}");
    assert!(said.contains("`engine-policy` cannot work, and chats depend on it"), "{said}");
}

/// Two loops over one folder of a store would do each other's work.
#[test]
fn a_store_that_another_loop_has_is_refused() {
    let fake = FakeS3::start();
    let mut looped = Loop::new(&format!("{SERVE}{BARE}store = \"s3://bucket/run\"\n"));
    looped.env = settings(&fake.endpoint);
    looped.env.push(("NO_PROXY".to_owned(), "127.0.0.1".to_owned()));
    let holder = json!({"host": "far", "pid": 7, "id": "other", "since": 1_767_225_600_000_i64});
    let claim = json!({"holder": holder, "write": "w", "released": false}).to_string();
    fake.put("run/loop.claim", claim.clone());
    let output = looped.command().assert().code(1);
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    let words =
        "another loop works over `s3://bucket/run`: process 7 on `far`, since 2026-01-01T00:00:00";
    assert!(said.contains(words), "{said}");
    assert!(said.contains("heard of 0 s ago\nhint: end that one first"), "{said}");
    assert_eq!(fake.get("run/loop.claim").unwrap(), claim);
}
