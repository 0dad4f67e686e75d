//! Jobs of a Slurm cluster: against commands that reply as Slurm 23.11 does, by its
//! documentation (fixtures/slurm/README.md). The
//! fake keeps its jobs in a folder, so that a test can say how they are.

mod states;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use oclaw::pipeline::{Error, Job, Slurm, State};

use super::ray::stages_over_a_store;
use crate::harness::{program, root};

/// A cluster in a folder: `commands/` and `jobs/NUMBER.{name,state,code,script,…}`.
struct FakeSlurm(tempfile::TempDir);

impl FakeSlurm {
    fn new() -> Self {
        let fake = Self(tempfile::tempdir().unwrap());
        for folder in ["commands", "jobs"] {
            fs::create_dir(fake.at(folder)).unwrap();
        }
        let script = fs::read_to_string(root().join("tests/room/pipeline/slurm/fake.sh")).unwrap();
        for name in ["sbatch", "squeue", "sacct", "scancel"] {
            let path = fake.at("commands").join(name);
            program(&path, &script.replace("@FOLDER@", &fake.0.path().display().to_string()));
        }
        fake
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn slurm(&self, arguments: &[&str]) -> Slurm {
        let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        Slurm::new(Some("gpu".to_owned()), arguments, "a loop").with_commands(self.at("commands"))
    }

    fn job(&self, id: &str) -> Job {
        Job {
            id: id.to_owned(),
            name: "judge".to_owned(),
            argv: ["oclaw", "judge", "--rules=it's $HOME"].map(str::to_owned).to_vec(),
            env: BTreeMap::from([("A".to_owned(), "b 'c'".to_owned())]),
            gpus: Vec::new(),
            log: self.at("100%.log"),
            folder: self.0.path().to_owned(),
            outlives: false,
        }
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap_or_default()
    }

    fn set(&self, number: u64, state: &str, code: &str) {
        fs::write(self.at(&format!("jobs/{number}.state")), state).unwrap();
        fs::write(self.at(&format!("jobs/{number}.code")), code).unwrap();
    }

    /// Lets the queue forget a job: the accounting still knows it.
    fn forget(&self, number: u64) {
        fs::write(self.at(&format!("jobs/{number}.gone")), "").unwrap();
    }

    fn switch(&self, name: &str, on: bool) {
        match on {
            true => fs::write(self.at(name), "").unwrap(),
            false => drop(fs::remove_file(self.at(name))),
        }
    }
}

#[tokio::test]
async fn a_job_of_a_run_in_a_store_names_the_store() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&[]);
    for (number, (name, argv, wanted)) in (1001..).zip(stages_over_a_store()) {
        slurm.start(&Job { argv, ..fake.job(&name) }).await.unwrap();
        let script = fake.read(&format!("jobs/{number}.script"));
        assert!(script.contains(wanted), "{script}");
        for local in ["--follow run", "-o run", "--out run"] {
            assert!(!script.contains(local), "{script}");
        }
    }
}

#[tokio::test]
async fn a_job_is_submitted_as_it_is() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&["--time=1-0", "--account=it's"]);
    let mut job = fake.job("judge-1");
    assert_eq!(slurm.poll(&job).await.unwrap(), State::Lost);
    slurm.start(&job).await.unwrap();
    let folder = fake.0.path().display();
    let arguments = fake.read("jobs/1001.arguments");
    let name = fake.read("jobs/1001.name");
    assert!(name.starts_with("oclaw-") && name.ends_with("-judge-1"), "{name}");
    let expected = [
        "--parsable".to_owned(),
        format!("--job-name={name}"),
        format!("--chdir={folder}"),
        // A percent sign would be a pattern.
        format!("--output={folder}/100%%.log"),
        "--open-mode=append".to_owned(),
        "--no-requeue".to_owned(),
        "--partition=gpu".to_owned(),
        "--time=1-0".to_owned(),
        "--account=it's".to_owned(),
    ];
    assert_eq!(arguments.lines().collect::<Vec<_>>(), expected);
    let script = fake.read("jobs/1001.script");
    assert_eq!(
        script,
        format!(
            "#!/bin/sh\nexport A='b '\\''c'\\'''\nexport CUDA_VISIBLE_DEVICES=\n\
             cd {folder} && exec oclaw judge '--rules=it'\\''s $HOME'\n"
        )
    );
    // Once more is the same job.
    slurm.start(&job).await.unwrap();
    fake.slurm(&[]).start(&job).await.unwrap();
    assert!(!fake.at("jobs/1002.name").exists());
    job = fake.job("judge-2");
    job.gpus = vec![3, 7];
    slurm.start(&job).await.unwrap();
    assert!(fake.read("jobs/1002.arguments").lines().any(|word| word == "--gpus=2"));
    assert!(!fake.read("jobs/1002.script").contains("CUDA"));
}

#[tokio::test]
async fn the_accounting_may_lag_or_not_be_there() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&[]);
    let job = fake.job("judge-1");
    slurm.start(&job).await.unwrap();
    let ended = |code| State::Ended { code };
    // The queue has forgotten it; so has, for a moment, the accounting.
    fake.forget(1001);
    fake.set(1001, "FAILED", "7:0");
    assert_eq!(slurm.poll(&job).await.unwrap(), ended(Some(7)));
    fake.switch("accounting-lags", true);
    for _ in 0..4 {
        assert_eq!(slurm.poll(&job).await.unwrap(), State::Pending);
    }
    assert_eq!(slurm.poll(&job).await.unwrap(), State::Lost);
    fake.switch("accounting-lags", false);
    // Another supervisor finds it by its name.
    assert_eq!(fake.slurm(&[]).poll(&job).await.unwrap(), ended(Some(7)));
    fake.set(1001, "DREAMING", "0:0");
    let error = slurm.poll(&job).await.unwrap_err().to_string();
    assert_eq!(error, "`sacct`: `DREAMING` is no state that is known");

    // Nobody keeps accounts: the queue knows what has ended for minutes, without codes.
    fake.switch("no-accounting", true);
    let next = fake.job("judge-2");
    slurm.start(&next).await.unwrap();
    let told = "failed, nobody knows how";
    for (state, wanted) in [
        ("PENDING", State::Pending),
        ("RUNNING", State::Running),
        ("COMPLETED", ended(Some(0))),
        ("FAILED", State::Over { told }),
        ("TIMEOUT", State::Over { told: "ran into its time limit" }),
    ] {
        fake.set(1002, state, "7:0");
        assert_eq!(slurm.poll(&next).await.unwrap(), wanted, "{state}");
    }
    fake.forget(1002);
    assert_eq!(slurm.poll(&next).await.unwrap(), State::Lost);
}

/// One call tells of all jobs, however many there are; nothing is asked again that a
/// look has shown.
#[tokio::test]
async fn a_look_is_one_call() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&[]);
    let jobs = ["judge", "hint", "train"]
        .map(|name| Job { name: name.to_owned(), ..fake.job(&format!("{name}-1")) });
    for job in &jobs {
        slurm.start(job).await.unwrap();
    }
    fake.set(1001, "RUNNING", "0:0");
    fake.set(1003, "RUNNING", "0:0");
    let calls = || {
        let calls = fake.read("calls");
        fs::remove_file(fake.at("calls")).unwrap();
        calls.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    calls();
    for _ in 0..2 {
        slurm.look().await.unwrap();
        let mut states = Vec::new();
        for job in &jobs {
            states.push(slurm.poll(job).await.unwrap());
        }
        assert_eq!(states, [State::Running, State::Pending, State::Running]);
        assert_eq!(calls(), ["squeue"]);
    }
    // Another supervisor finds them all by the same call.
    let mut other = fake.slurm(&[]);
    other.look().await.unwrap();
    for job in &jobs {
        assert!(other.poll(job).await.unwrap().is_alive());
    }
    assert_eq!(calls(), ["squeue"]);
    // How one has ended is asked once.
    fake.set(1003, "FAILED", "1:0");
    slurm.look().await.unwrap();
    for (job, wanted) in
        jobs.iter().zip([State::Running, State::Pending, State::Ended { code: Some(1) }])
    {
        assert_eq!(slurm.poll(job).await.unwrap(), wanted);
    }
    assert_eq!(calls(), ["squeue", "sacct"]);
    // A look that fails is no news of any of them.
    fake.switch("controller-away", true);
    assert!(slurm.look().await.is_err());
    for job in &jobs {
        let error = slurm.poll(job).await.unwrap_err().to_string();
        assert!(error.contains("Unable to contact slurm controller"), "{error}");
    }
    assert_eq!(calls(), ["squeue"]);
}

#[tokio::test]
async fn a_submission_whose_answer_is_lost_makes_one_job() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&[]);
    let first = fake.job("judge-1");
    fake.switch("sbatch-loses", true);
    slurm.start(&first).await.unwrap();
    assert_eq!(slurm.poll(&first).await.unwrap(), State::Pending);
    fake.switch("sbatch-loses", false);
    slurm.start(&first).await.unwrap();
    assert!(!fake.at("jobs/1002.name").exists());

    // Nobody says what became of it, and the supervisor starts the next one.
    let second = fake.job("judge-2");
    fake.switch("sbatch-loses", true);
    fake.switch("squeue-fails-later", true);
    let error = slurm.start(&second).await.unwrap_err().to_string();
    let away = "Unable to contact slurm controller (connect failure)";
    assert!(error.starts_with("`squeue`: ") && error.contains(away), "{error}");
    fake.switch("sbatch-loses", false);
    fake.switch("squeue-fails-later", false);
    fake.switch("controller-away", false);
    slurm.start(&fake.job("judge-3")).await.unwrap();
    assert_eq!(fake.read("jobs/1002.cancelled"), "1002\n");
    assert!(fake.read("jobs/1003.name").ends_with("-judge-3"));
}

#[tokio::test]
async fn a_job_is_asked_to_end_by_what_reaches_it() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&[]);
    let job = fake.job("judge-1");
    slurm.stop(&job, false).await.unwrap();
    slurm.start(&job).await.unwrap();
    slurm.stop(&job, false).await.unwrap();
    assert_eq!(fake.read("jobs/1001.cancelled"), "1001\n");
    fake.set(1001, "RUNNING", "0:0");
    slurm.stop(&job, false).await.unwrap();
    slurm.stop(&job, true).await.unwrap();
    let signals = "1001\n--signal=TERM --full 1001\n--signal=KILL --full 1001\n";
    assert_eq!(fake.read("jobs/1001.cancelled"), signals);
    fake.set(1001, "COMPLETED", "0:0");
    slurm.stop(&job, true).await.unwrap();
    fake.forget(1001);
    slurm.stop(&job, true).await.unwrap();
    assert_eq!(fake.read("jobs/1001.cancelled"), signals);
}

#[tokio::test]
async fn a_controller_that_is_away_is_no_news_of_a_job() {
    let fake = FakeSlurm::new();
    let mut slurm = fake.slurm(&[]);
    let job = fake.job("judge-1");
    slurm.start(&job).await.unwrap();
    fake.switch("controller-away", true);
    let error = slurm.poll(&job).await.unwrap_err();
    assert!(matches!(&error, Error::Scheduler { whom, .. } if whom == "squeue"), "{error}");
    fake.switch("controller-away", false);
    assert_eq!(slurm.poll(&job).await.unwrap(), State::Pending);
    let mut nowhere = Slurm::new(None, Vec::new(), "x").with_commands(Path::new("/no").to_owned());
    let error = nowhere.start(&job).await.unwrap_err();
    assert!(matches!(&error, Error::Command { program, .. } if program == "squeue"), "{error}");
    let version = fake.slurm(&[]).version().await.unwrap();
    assert_eq!(version, "slurm 23.11.4");
    fs::remove_file(fake.at("commands/scancel")).unwrap();
    let error = fake.slurm(&[]).version().await.unwrap_err().to_string();
    assert_eq!(error, "cannot run `scancel`, a command of the scheduler");
}
