//! Processes of this machine, as jobs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use oclaw::pipeline::{Job, Local, State};

fn job(folder: &Path, script: &str) -> Job {
    Job {
        id: "job-1".to_owned(),
        name: "job".to_owned(),
        argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
        env: BTreeMap::from([("WORD".to_owned(), "said".to_owned())]),
        gpus: vec![4, 5],
        log: folder.join("job.log"),
        folder: folder.to_owned(),
        outlives: false,
    }
}

fn wait(local: &mut Local, job: &Job) -> State {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match local.poll(job) {
            State::Running if Instant::now() < until => std::thread::yield_now(),
            state => return state,
        }
    }
}

#[test]
fn a_job_gets_its_devices_and_tells_its_code() {
    let folder = tempfile::tempdir().unwrap();
    let mut local = Local::new(folder.path());
    let job = job(folder.path(), "echo $WORD $CUDA_VISIBLE_DEVICES; echo aside >&2; exit 7");
    assert_eq!(local.poll(&job), State::Lost);
    local.start(&job).unwrap();
    assert_eq!(wait(&mut local, &job), State::Ended { code: Some(7) });
    let log = std::fs::read_to_string(&job.log).unwrap();
    assert_eq!(log, "said 4,5\naside\n");
    let absent = Job { argv: vec!["/nowhere/at/all".to_owned()], ..job };
    let error = local.start(&absent).unwrap_err();
    assert_eq!(error.to_string(), "cannot start `job` (`/nowhere/at/all`)");
}

#[test]
fn a_job_is_stopped_with_all_that_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let mut local = Local::new(folder.path());
    // The reader of the pipe sees its end only when both of its writers have ended.
    let fifo = folder.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let job = job(folder.path(), "exec 3>fifo; sleep 1000 & trap '' TERM; echo up; wait; wait");
    local.start(&job).unwrap();
    let reader = std::fs::File::open(&fifo).unwrap();
    assert_eq!(local.poll(&job), State::Running);
    local.stop(&job, true);
    assert_eq!(wait(&mut local, &job), State::Ended { code: None });
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut &reader, &mut rest).unwrap();
}

#[test]
fn what_outlives_the_supervisor_is_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job { outlives: true, ..job(folder.path(), "echo up; exec sleep 1000") };
    let mut first = Local::new(folder.path());
    first.start(&job).unwrap();
    let pid = first.pid(&job).unwrap();
    let mut second = Local::new(folder.path());
    second.start(&job).unwrap();
    assert!(second.is_adopted(&job));
    assert_eq!(second.pid(&job), Some(pid));
    // Also where the record was never written.
    std::fs::remove_file(folder.path().join("job.process.json")).unwrap();
    let mut third = Local::new(folder.path());
    assert_eq!(third.poll(&job), State::Running);
    assert_eq!(third.pid(&job), Some(pid));
    // A number that is used again is somebody else.
    let record = format!(r#"{{"id":"job-1","pid":{pid},"started":1,"boot":"other"}}"#);
    std::fs::write(folder.path().join("job.process.json"), record).unwrap();
    let other = Job { outlives: false, ..job.clone() };
    assert_eq!(Local::new(folder.path()).poll(&other), State::Lost);
    second.stop(&job, false);
    assert_eq!(wait(&mut first, &job), State::Ended { code: None });
    // Who has not started it is not told how it ended.
    let told = "ended, nobody knows how: another supervisor had started it";
    assert_eq!(wait(&mut second, &job), State::Over { told });
}

#[test]
fn what_nobody_wants_any_more_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job { outlives: true, ..job(folder.path(), "exec sleep 1000") };
    let mut first = Local::new(folder.path());
    first.start(&job).unwrap();
    let second = Local::new(folder.path());
    assert_eq!(second.others(&["job-1".to_owned()]).unwrap(), Vec::<String>::new());
    let keep = ["job-2".to_owned()];
    assert_eq!(second.others(&keep).unwrap(), ["job"]);
    second.end_others(&keep, false).unwrap();
    assert_eq!(wait(&mut first, &job), State::Ended { code: None });
    assert_eq!(second.others(&[]).unwrap(), Vec::<String>::new());
}
