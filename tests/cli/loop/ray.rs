//! A whole loop whose processes are jobs of a real Ray head: on loopback, of the
//! package that `.ci/run` installs.

mod head;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use oclaw::pipeline::{Job, Ray, State};
use serde_json::Value;

use super::chats::converse;
use super::whole::with_model;
use super::{Loop, PATIENCE, signal};
use crate::harness::root;
use head::Head;

/// Scores alone: each further stage is a further job, which costs Ray a process.
const CONFIG: &str = r#"
[serve]
model = "MODEL"
listen = "FRONT"
engine-listen = "ENGINE"
dtype = "f32"
shard-age = "200ms"
env = { OMP_NUM_THREADS = "1" }
[judge]
rules = ""
poll = "200ms"
[advantage]
estimator = "grpo"
poll = "200ms"
[train]
estimator = "grpo"
batch-turns = 2
max-wait = "1s"
lr = 1e-3
poll = "200ms"
max-staleness = 100
gpus = [7]
env = { OMP_NUM_THREADS = "1" }
[sync-weights]
poll = "200ms"
[loop]
without = ["hint", "teacher-lp"]
restart-wait = "500ms"
restart-longest = "2s"
[scheduler]
kind = "ray"
address = "HEAD"
poll = "500ms"
"#;

const JOBS: [&str; 5] = ["serve", "judge", "advantage", "train", "sync-weights"];

/// Asks the head for all of its jobs: name and status.
fn jobs(head: &Head) -> Vec<(String, String)> {
    let address = head.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET /api/jobs/ HTTP/1.0\r\nhost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let body = text.split_once("\r\n\r\n").unwrap().1;
    let list: Value = serde_json::from_str(body).unwrap();
    let told = |job: &Value| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (text(&job["metadata"]["oclaw_name"]), text(&job["status"]))
    };
    list.as_array().unwrap().iter().map(told).collect()
}

/// Finds the process of a stage by its folder and its command.
fn process(looped: &Loop, stage: &str) -> (i64, Vec<String>) {
    let here = looped.path("").canonicalize().unwrap();
    let split = |bytes: Vec<u8>| -> Vec<String> {
        let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word));
        words.map(|word| word.into_owned()).collect()
    };
    let numbers = fs::read_dir("/proc").unwrap();
    let numbers = numbers.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<i64>().ok());
    for pid in numbers {
        let place = format!("/proc/{pid}");
        let there = fs::read_link(format!("{place}/cwd")).is_ok_and(|cwd| cwd == here);
        let words = split(fs::read(format!("{place}/cmdline")).unwrap_or_default());
        if there && words.get(1).is_some_and(|word| word == stage) {
            return (pid, split(fs::read(format!("{place}/environ")).unwrap()));
        }
    }
    panic!("no process of `{stage}`");
}

#[test]
fn a_whole_loop_runs_as_jobs_of_a_real_head() {
    let packages = root().join("target/tools/ray");
    if !packages.join("ray").is_dir() {
        println!("skipped: no Ray in target/tools/ray (`.ci/run` installs it)");
        return;
    }
    let head = Head::start(&packages);
    let looped = Loop::new(&with_model(CONFIG).replace("HEAD", &head.url));
    let mut first = looped.start();
    // The head answers before it can take jobs: what it refuses is asked for again.
    first.hears("serve: ready");
    first.hears("sync-weights: started");
    assert_eq!(converse(&looped.front, "first", 4), 0);
    let engine = format!("http://{}", looped.engine);
    looped.until("a policy is served", |status| {
        let served = status["policy"]["served"][&engine].as_str().unwrap_or("0");
        served != "0" && status["account"]["trained"].as_i64() >= Some(2)
    });
    let running: Vec<(String, String)> = jobs(&head);
    assert_eq!(running.len(), JOBS.len(), "{running:?}");
    assert!(running.iter().all(|(_, status)| status == "RUNNING"), "{running:?}");
    // A device is asked for by its number, and Ray says which one of its two it is.
    let devices = |stage: &str| {
        let (_, variables) = process(&looped, stage);
        let mut told = variables.iter().filter_map(|it| it.strip_prefix("CUDA_VISIBLE_DEVICES="));
        told.next().unwrap().to_owned()
    };
    assert!(["0", "1"].contains(&devices("train").as_str()), "{}", devices("train"));
    assert_eq!(devices("judge"), "");

    // Jobs outlive the loop; the next one takes them up, and starts again what ends.
    first.kill();
    assert_eq!(converse(&looped.front, "alone", 4), 0);
    let mut second = looped.start();
    for stage in JOBS {
        second.hears(&format!("{stage}: taken up"));
    }
    signal(process(&looped, "judge").0, "KILL");
    second.hears("judge: was killed: started again in 0.5 s");
    second.hears("judge: started");
    looped.until("every turn is trained", |status| {
        let account = &status["account"];
        let refused = super::sum(&account["refused"]);
        account["captured"] == 6 && account["trained"].as_i64() == Some(6 - refused)
    });
    let (code, words) = second.stop();
    assert_eq!(code, Some(0), "{words}");
    let ended = jobs(&head);
    let over = ["STOPPED", "SUCCEEDED", "FAILED"];
    assert!(ended.iter().all(|(_, status)| over.contains(&status.as_str())), "{ended:?}");
    let failed: Vec<_> = ended.iter().filter(|(_, status)| status == "FAILED").collect();
    assert_eq!((ended.len(), failed.len()), (JOBS.len() + 1, 1), "{ended:?}");
    assert_eq!(failed[0].0, "judge");
    // What they said was fetched, piece by piece, once.
    let log =
        |name: &str| fs::read_to_string(looped.path(&format!("run/logs/{name}.log"))).unwrap();
    assert_eq!(log("train").matches("starting from the model as step 0").count(), 1);
    assert!(log("judge").contains("rows, "), "{}", log("judge"));
    submit_twice(&head, &looped);
}

/// The same id again is the same job, and its exit code is told.
fn submit_twice(head: &Head, looped: &Loop) {
    let job = Job {
        id: "again-1".to_owned(),
        name: "again".to_owned(),
        argv: ["sh", "-c", "exit 3"].map(str::to_owned).to_vec(),
        env: BTreeMap::new(),
        gpus: Vec::new(),
        log: looped.path("again.log"),
        folder: looped.path(""),
        outlives: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut ray = Ray::new(&head.url, "again", None).unwrap();
        ray.start(&job).await.unwrap();
        ray.start(&job).await.unwrap();
        let start = Instant::now();
        while ray.poll(&job).await.unwrap().is_alive() {
            assert!(start.elapsed() < PATIENCE, "it does not end");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        assert_eq!(ray.poll(&job).await.unwrap(), State::Ended { code: Some(3) });
    });
    assert_eq!(jobs(head).iter().filter(|(name, _)| name == "again").count(), 1);
}
