//! Jobs of a Ray cluster: against a fake that answers in the words of Ray 2.60. A
//! whole loop on a real head is in tests/cli/loop/ray.rs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use oclaw::pipeline::{Error, Job, Ray, Run, State};
use secrecy::SecretString;
use serde_json::{Value, json};

use super::children::{NODE, cast_at};

/// A head with its jobs.
struct FakeRay {
    url: String,
    inside: Arc<Mutex<Inside>>,
    runtime: Option<tokio::runtime::Runtime>,
}

#[derive(Default)]
struct Inside {
    /// By submission id.
    jobs: BTreeMap<String, Value>,
    logs: BTreeMap<String, String>,
    stopped: Vec<String>,
    /// Answers that are lost, by "METHOD" of the request.
    losing: BTreeSet<&'static str>,
    /// Submissions that come to nothing.
    refusing: bool,
    authorization: Option<String>,
}

impl FakeRay {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let inside = Arc::new(Mutex::new(Inside::default()));
        let router = Router::new().fallback(answer).with_state(inside.clone());
        runtime.spawn(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await
        });
        Self { url, inside, runtime: Some(runtime) }
    }

    fn ray(&self) -> Ray {
        Ray::new(&self.url, "a loop", None).unwrap()
    }

    fn with<T>(&self, act: impl FnOnce(&mut Inside) -> T) -> T {
        act(&mut self.inside.lock().unwrap())
    }

    /// Returns the only job.
    fn job(&self) -> (String, Value) {
        self.with(|inside| {
            assert_eq!(inside.jobs.len(), 1);
            inside.jobs.first_key_value().map(|(id, job)| (id.clone(), job.clone())).unwrap()
        })
    }

    fn set(&self, status: &str, code: Option<i32>) {
        self.with(|inside| {
            for job in inside.jobs.values_mut() {
                job["status"] = json!(status);
                job["driver_exit_code"] = json!(code);
            }
        });
    }
}

impl Drop for FakeRay {
    /// A test may be inside another runtime, where none may be waited for.
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

async fn answer(
    Shared(inside): Shared<Arc<Mutex<Inside>>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, String) {
    let mut inside = inside.lock().unwrap();
    inside.authorization =
        headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    let answer = inside.answer(&method, uri.path(), &body);
    match inside.losing.contains(method.as_str()) {
        true => (StatusCode::BAD_GATEWAY, "upstream connect error".to_owned()),
        false => answer,
    }
}

impl Inside {
    fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, String) {
        if path == "/api/version" {
            let told = json!({"version": "4", "ray_version": "2.60.0", "session_name": "s"});
            return (StatusCode::OK, told.to_string());
        }
        let path = path.strip_prefix("/api/jobs/").unwrap();
        if path.is_empty() && method == Method::POST {
            return self.submit(serde_json::from_slice(body).unwrap());
        }
        let (id, rest) = path.split_once('/').unwrap_or((path, ""));
        let Some(job) = self.jobs.get(id) else {
            return (StatusCode::NOT_FOUND, format!("Job {id} does not exist"));
        };
        match (method, rest) {
            (&Method::GET, "") => (StatusCode::OK, job.to_string()),
            (&Method::GET, "logs") => (
                StatusCode::OK,
                json!({"logs": self.logs.get(id).cloned().unwrap_or_default()}).to_string(),
            ),
            (&Method::POST, "stop") => {
                self.stopped.push(id.to_owned());
                (StatusCode::OK, json!({"stopped": true}).to_string())
            }
            _ => (StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed".to_owned()),
        }
    }

    fn submit(&mut self, mut job: Value) -> (StatusCode, String) {
        let id = job["submission_id"].as_str().unwrap().to_owned();
        let trouble = |last: &str| {
            let text =
                format!("Traceback (most recent call last):\n  File \"job_head.py\"\n{last}\n.\n");
            (StatusCode::INTERNAL_SERVER_ERROR, text)
        };
        if self.refusing {
            return trouble("RuntimeError: Request failed with status code 500: no agent yet");
        }
        if self.jobs.contains_key(&id) {
            return trouble(&format!(
                "ValueError: Job with submission_id {id} already exists. Please use a different submission_id."
            ));
        }
        job["type"] = json!("SUBMISSION");
        job["job_id"] = Value::Null;
        job["status"] = json!("PENDING");
        job["driver_exit_code"] = Value::Null;
        self.jobs.insert(id.clone(), job);
        (StatusCode::OK, json!({"job_id": id, "submission_id": id}).to_string())
    }
}

fn job(folder: &Path, id: &str) -> Job {
    Job {
        id: id.to_owned(),
        name: "judge".to_owned(),
        argv: ["oclaw", "judge", "--rules=it's"].map(str::to_owned).to_vec(),
        env: BTreeMap::from([("A".to_owned(), "b c".to_owned())]),
        gpus: Vec::new(),
        log: folder.join("judge.log"),
        folder: folder.to_owned(),
        outlives: false,
    }
}

#[tokio::test]
async fn a_job_is_submitted_as_it_is_and_its_states_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeRay::start();
    let mut ray = fake.ray();
    let mut asked = job(folder.path(), "judge-1");
    assert_eq!(ray.poll(&asked).await.unwrap(), State::Lost);
    ray.start(&asked).await.unwrap();
    let (id, told) = fake.job();
    assert!(id.starts_with("oclaw-") && id.ends_with("-judge-1"), "{id}");
    let path = folder.path().display();
    assert_eq!(told["entrypoint"], format!("cd {path} && exec oclaw judge '--rules=it'\\''s'"));
    let env = json!({"A": "b c", "CUDA_VISIBLE_DEVICES": "", "RAY_JOB_STOP_WAIT_TIME_S": "60"});
    assert_eq!(told["runtime_env"]["env_vars"], env);
    assert_eq!(told["metadata"], json!({"oclaw_job": "judge-1", "oclaw_name": "judge"}));
    assert_eq!(told.get("entrypoint_num_gpus"), None);
    let over = |told| State::Over { told };
    for (status, code, state) in [
        ("PENDING", None, State::Pending),
        ("RUNNING", None, State::Running),
        ("SUCCEEDED", Some(0), State::Ended { code: Some(0) }),
        ("FAILED", Some(3), State::Ended { code: Some(3) }),
        // By a signal.
        ("FAILED", Some(-9), State::Ended { code: None }),
        (
            "FAILED",
            None,
            over("failed before it ran, or with its node: the head's dashboard says why"),
        ),
        ("STOPPED", None, over("was stopped")),
    ] {
        fake.set(status, code);
        assert_eq!(ray.poll(&asked).await.unwrap(), state);
    }
    fake.set("DREAMING", None);
    let error = ray.poll(&asked).await.unwrap_err().to_string();
    assert!(error.ends_with("job `judge` is `DREAMING`, which is no state"), "{error}");
    // Devices are asked for by their number, and Ray says which.
    fake.with(|inside| inside.jobs.clear());
    asked.gpus = vec![4, 5];
    ray.start(&asked).await.unwrap();
    let (_, told) = fake.job();
    assert_eq!(told["entrypoint_num_gpus"], 2);
    assert_eq!(told["runtime_env"]["env_vars"].get("CUDA_VISIBLE_DEVICES"), None);
    ray.stop(&asked, false).await.unwrap();
    fake.with(|inside| assert_eq!(inside.stopped, [id]));
    // Another loop's job of the same name is another one.
    let mut other = Ray::new(&fake.url, "another loop", None).unwrap();
    assert_eq!(other.poll(&asked).await.unwrap(), State::Lost);
}

#[tokio::test]
async fn a_submission_whose_answer_is_lost_makes_one_job() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeRay::start();
    let mut ray = fake.ray();
    let first = job(folder.path(), "judge-1");
    fake.with(|inside| inside.losing = BTreeSet::from(["POST"]));
    ray.start(&first).await.unwrap();
    assert_eq!(ray.poll(&first).await.unwrap(), State::Pending);
    fake.with(|inside| inside.losing.clear());
    // By the next supervisor, who knows nothing of it.
    fake.ray().start(&first).await.unwrap();
    fake.job();

    // Nobody says what became of it, and the supervisor starts the next one.
    let second = job(folder.path(), "judge-2");
    fake.with(|inside| inside.jobs.clear());
    fake.with(|inside| inside.losing = BTreeSet::from(["POST", "GET"]));
    assert!(ray.start(&second).await.is_err());
    assert!(ray.poll(&second).await.is_err());
    fake.with(|inside| inside.losing.clear());
    let (id, _) = fake.job();
    ray.start(&job(folder.path(), "judge-3")).await.unwrap();
    fake.with(|inside| assert_eq!(inside.stopped, [id]));

    // One that the head did not take is an error in its words.
    fake.with(|inside| inside.refusing = true);
    let error = ray.start(&job(folder.path(), "judge-4")).await.unwrap_err().to_string();
    assert!(
        error.ends_with(
            "status 500: RuntimeError: Request failed with status code 500: no agent yet"
        ),
        "{error}"
    );
}

#[tokio::test]
async fn a_head_that_is_away_is_no_news_of_a_job() {
    let folder = tempfile::tempdir().unwrap();
    let asked = job(folder.path(), "judge-1");
    let fake = FakeRay::start();
    let mut ray = fake.ray();
    ray.start(&asked).await.unwrap();
    let url = fake.url.trim_end_matches('/').to_owned();
    drop(fake);
    let begun = std::time::Instant::now();
    let error = loop {
        match ray.poll(&asked).await {
            Err(error) => break error,
            // Its last answers are under way.
            Ok(_) => assert!(begun.elapsed().as_secs() < 30),
        }
    };
    assert!(matches!(&error, Error::Scheduler { whom, .. } if *whom == url), "{error}");
    assert!(ray.logs(&asked).await.is_err());
    let wrong = Ray::new("head:8265", "x", None).unwrap_err().to_string();
    assert!(wrong.contains("give it as `http://HEAD:8265`"), "{wrong}");
}

#[tokio::test]
async fn a_log_is_taken_piece_by_piece() {
    let folder = tempfile::tempdir().unwrap();
    let asked = job(folder.path(), "judge-1");
    let fake = FakeRay::start();
    let mut ray = fake.ray();
    ray.logs(&asked).await.unwrap();
    ray.start(&asked).await.unwrap();
    let (id, _) = fake.job();
    let says = |text: &str| fake.with(|inside| inside.logs.insert(id.clone(), text.to_owned()));
    let log = || std::fs::read_to_string(&asked.log).unwrap_or_default();
    says("one\n");
    ray.logs(&asked).await.unwrap();
    ray.logs(&asked).await.unwrap();
    assert_eq!(log(), "one\n");
    // Somebody cut the file, and another supervisor goes on.
    std::fs::write(&asked.log, "").unwrap();
    says("one\ntwö");
    fake.ray().logs(&asked).await.unwrap();
    assert_eq!(log(), "twö");
    // The next start's log is taken from its begin.
    let next = job(folder.path(), "judge-2");
    fake.with(|inside| inside.jobs.clear());
    ray.start(&next).await.unwrap();
    let (id, _) = fake.job();
    fake.with(|inside| inside.logs.insert(id, "three".to_owned()));
    ray.logs(&next).await.unwrap();
    assert_eq!(log(), "twöthree");
}

#[tokio::test]
async fn a_long_log_is_asked_for_less_often_and_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let asked = job(folder.path(), "judge-1");
    let fake = FakeRay::start();
    let mut ray = fake.ray();
    ray.start(&asked).await.unwrap();
    let (id, _) = fake.job();
    // Of 7 MiB, so that it rests for as many seconds.
    let said = "a line of twenty ö\n".repeat(3 << 17);
    let says = |text: &str| fake.with(|inside| inside.logs.insert(id.clone(), text.to_owned()));
    let length = || std::fs::metadata(&asked.log).unwrap().len();
    says(&said);
    ray.logs(&asked).await.unwrap();
    assert_eq!(length(), said.len() as u64);
    says(&format!("{said}the end\n"));
    ray.logs(&asked).await.unwrap();
    assert_eq!(length(), said.len() as u64);
    fake.set("SUCCEEDED", Some(0));
    assert_eq!(ray.poll(&asked).await.unwrap(), State::Ended { code: Some(0) });
    ray.logs(&asked).await.unwrap();
    assert_eq!(length(), said.len() as u64 + 8);
    // A shorter one is another one, and comes whole.
    says("anew\n");
    ray.poll(&asked).await.unwrap();
    ray.logs(&asked).await.unwrap();
    assert_eq!(length(), said.len() as u64 + 8 + 5);
}

/// A node of the cluster has none of the folders of shards.
#[tokio::test]
async fn a_job_of_a_run_in_a_store_names_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeRay::start();
    let mut ray = fake.ray();
    for (name, argv, wanted) in stages_over_a_store() {
        fake.with(|inside| inside.jobs.clear());
        let asked = Job { argv, ..job(folder.path(), &name) };
        ray.start(&asked).await.unwrap();
        let (_, told) = fake.job();
        let entry = told["entrypoint"].as_str().unwrap();
        assert!(entry.contains(wanted), "{entry}");
        for local in ["--follow run", "-o run", "--out run"] {
            assert!(!entry.contains(local), "{entry}");
        }
    }
}

/// Returns the commands of two stages of a run whose shards and policies are in a
/// store, and what they say of that.
pub(super) fn stages_over_a_store() -> [(String, Vec<String>, &'static str); 2] {
    let run = Run::new("run").with_store(Some("s3://chats/run".to_owned()));
    let config = format!("{NODE}[judge]\nrules = \"\"\n[hint]\nfrom-feedback = true\n");
    let children = cast_at(run, &config, &[]).unwrap();
    [
        ("judge", "--follow s3://chats/run/turns -o s3://chats/run/judged"),
        ("train", "--follow s3://chats/run/ready --out s3://chats/run/policy"),
    ]
    .map(|(name, wanted)| {
        let child = children.iter().find(|child| child.name == name).unwrap();
        (name.to_owned(), child.argv.clone(), wanted)
    })
}

#[tokio::test]
async fn a_head_tells_its_version() {
    let fake = FakeRay::start();
    assert_eq!(fake.ray().version().await.unwrap(), "2.60.0");
    let other = crate::harness::fake_engine::FakeEngine::start();
    other.otherwise(crate::harness::fake_engine::Reply::json(200, json!({"version": "1"})));
    let error = Ray::new(&other.url(), "x", None).unwrap().version().await.unwrap_err();
    assert!(error.to_string().ends_with("names no `ray_version`: is it a Ray head?"), "{error}");
}

#[tokio::test]
async fn a_token_goes_along() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeRay::start();
    let mut ray = Ray::new(&fake.url, "x", Some(&SecretString::from("t0ken\n"))).unwrap();
    ray.poll(&job(folder.path(), "a")).await.unwrap();
    fake.with(|inside| assert_eq!(inside.authorization.as_deref(), Some("Bearer t0ken")));
}
