//! Jobs of a Ray cluster, by the Jobs API of its head.
//!
//! A job's id there is made of the loop and the job, so that a submission whose
//! answer was lost finds the job that it made. A head that does not answer is no
//! news of a job: [`Ray::poll`] errors, and the caller asks again.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Client, Method, Response, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Error, Job, State, quoting, taken};

/// Longest wait for an answer of the head.
const ANSWER: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(5);
/// Time that a job gets to end by itself, in seconds. Ray's own is three.
const STOP_WAIT: &str = "60";
/// Largest answer, which is a log.
const LARGEST: u64 = 64 << 20;

/// The head of a cluster.
#[derive(Debug)]
pub struct Ray {
    client: Client,
    base: String,
    scope: String,
    /// Jobs of which nobody knows whether they were submitted, by name.
    unsure: HashMap<String, String>,
}

/// What the head tells of a job.
#[derive(Debug, Deserialize)]
struct Told {
    status: String,
    driver_exit_code: Option<i32>,
}

impl Ray {
    /// Prepares to talk to a head (`http://HEAD:8265`). `scope` sets the jobs of one
    /// loop apart from those of another.
    pub fn new(address: &str, scope: &str, token: Option<&SecretString>) -> Result<Self, Error> {
        let base = address.trim_end_matches('/').to_owned();
        let refuse = |problem: String| Error::Scheduler { whom: base.clone(), problem };
        // A second installation is an error that says that there is one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            let value = format!("Bearer {}", token.expose_secret().trim());
            let mut value = HeaderValue::from_str(&value)
                .map_err(|_| refuse("the token holds what no header can carry".to_owned()))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let url = reqwest::Url::parse(&base).map_err(|error| refuse(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(refuse("give it as `http://HEAD:8265`".to_owned()));
        }
        let mut builder = Client::builder()
            .default_headers(headers)
            .timeout(ANSWER)
            .connect_timeout(CONNECT)
            .redirect(reqwest::redirect::Policy::none());
        if matches!(url.host_str(), Some("127.0.0.1" | "localhost" | "[::1]")) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|error| refuse(error.to_string()))?;
        let scope = quoting::scope(scope);
        Ok(Self { client, base, scope, unsure: HashMap::new() })
    }

    /// Asks a head which version it is: whether there is one that takes jobs.
    pub async fn version(&self) -> Result<String, Error> {
        let answer = self.ask(Method::GET, "/api/version", None).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        match answer.get("ray_version").and_then(Value::as_str) {
            Some(version) => Ok(version.to_owned()),
            None => {
                let problem = "its answer names no `ray_version`: is it a Ray head?".to_owned();
                Err(self.failed(Answer::None(problem)))
            }
        }
    }

    /// Submits a job. One of the same id that is there already is taken up.
    pub async fn start(&mut self, job: &Job) -> Result<(), Error> {
        self.settle(job).await?;
        self.unsure.insert(job.name.clone(), job.id.clone());
        let mut env: BTreeMap<_, _> = job.env.clone();
        env.entry("RAY_JOB_STOP_WAIT_TIME_S".to_owned()).or_insert_with(|| STOP_WAIT.to_owned());
        let mut body = json!({
            "entrypoint": quoting::command(job),
            "submission_id": self.id(&job.id),
            "runtime_env": {"env_vars": env},
            "metadata": {"oclaw_job": job.id, "oclaw_name": job.name},
        });
        match job.gpus.len() {
            // Without a request Ray would show it every device of the head.
            0 => body["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] = json!(""),
            count => body["entrypoint_num_gpus"] = json!(count),
        }
        let answer = self.ask(Method::POST, "/api/jobs/", Some(&body)).await;
        let refused = match answer {
            Ok(_) => None,
            Err(Answer::Refused(_, text)) if text.contains("already exists") => None,
            Err(error) => Some(error),
        };
        match refused {
            None => {}
            // No answer, or one that does not say what has become of it.
            Some(Answer::None(_) | Answer::Refused(500..=599, _))
                if self.told(&job.id).await?.is_some() => {}
            Some(error) => {
                self.unsure.remove(&job.name);
                return Err(self.failed(error));
            }
        }
        self.unsure.remove(&job.name);
        Ok(())
    }

    /// Sees to a job that was submitted, or not, when this one was last started:
    /// there shall not be two of them.
    async fn settle(&mut self, job: &Job) -> Result<(), Error> {
        let Some(before) = self.unsure.get(&job.name).filter(|id| **id != job.id).cloned() else {
            return Ok(());
        };
        if let Some(told) = self.told(&before).await?
            && told.state().is_none_or(State::is_alive)
        {
            self.end(&before).await?;
        }
        self.unsure.remove(&job.name);
        Ok(())
    }

    /// Says how a job is. Errors if the head does not.
    pub async fn poll(&mut self, job: &Job) -> Result<State, Error> {
        let Some(told) = self.told(&job.id).await? else { return Ok(State::Lost) };
        told.state().ok_or_else(|| Error::Scheduler {
            whom: self.base.clone(),
            problem: format!("job `{}` is `{}`, which is no state", job.name, told.status),
        })
    }

    /// Appends what is new of a job's log to its file.
    pub async fn logs(&mut self, job: &Job) -> Result<(), Error> {
        let path = format!("/api/jobs/{}/logs", self.id(&job.id));
        let answer = match self.ask(Method::GET, &path, None).await {
            Err(Answer::Refused(404, _)) => return Ok(()),
            answer => answer.map_err(|error| self.failed(error))?,
        };
        match answer.get("logs").and_then(Value::as_str) {
            Some(text) => taken::append(job, text.as_bytes()),
            None => Ok(()),
        }
    }

    /// Asks a job to end. Ray ends it after a minute if it does not.
    pub async fn stop(&mut self, job: &Job, _at_once: bool) -> Result<(), Error> {
        self.end(&job.id).await
    }

    async fn end(&self, id: &str) -> Result<(), Error> {
        let path = format!("/api/jobs/{}/stop", self.id(id));
        match self.ask(Method::POST, &path, None).await {
            Ok(_) | Err(Answer::Refused(404, _)) => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    async fn told(&self, id: &str) -> Result<Option<Told>, Error> {
        let path = format!("/api/jobs/{}", self.id(id));
        match self.ask(Method::GET, &path, None).await {
            Ok(answer) => match serde_json::from_value(answer) {
                Ok(told) => Ok(Some(told)),
                Err(error) => {
                    Err(self.failed(Answer::None(format!("no account of a job: {error}"))))
                }
            },
            Err(Answer::Refused(404, _)) => Ok(None),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn id(&self, id: &str) -> String {
        format!("oclaw-{}-{id}", self.scope)
    }

    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, Answer> {
        let none = |error: reqwest::Error| Answer::None(causes(&error));
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.map_err(none)?;
        let status = response.status();
        let text = read(response).await?;
        match status {
            StatusCode::OK => serde_json::from_slice(&text)
                .map_err(|_| Answer::None("its answer is no JSON: is it a Ray head?".to_owned())),
            status => {
                let text = String::from_utf8_lossy(&text).into_owned();
                Err(Answer::Refused(status.as_u16(), text))
            }
        }
    }

    fn failed(&self, answer: Answer) -> Error {
        let problem = match answer {
            Answer::None(problem) => problem,
            // A traceback, of which the last line tells.
            Answer::Refused(status, text) => {
                let mut lines = text.lines().map(str::trim);
                let last = lines.rfind(|line| line.len() > 1).unwrap_or_default();
                format!("status {status}: {last}")
            }
        };
        Error::Scheduler { whom: self.base.clone(), problem }
    }
}

/// An answer that is none of the wanted ones.
enum Answer {
    None(String),
    Refused(u16, String),
}

impl Told {
    fn state(&self) -> Option<State> {
        match self.status.as_str() {
            "PENDING" => Some(State::Pending),
            "RUNNING" => Some(State::Running),
            "SUCCEEDED" => Some(State::Ended { code: Some(0) }),
            "FAILED" => Some(match self.driver_exit_code {
                Some(code @ 0..) => State::Ended { code: Some(code) },
                // A signal, by its number.
                Some(_) => State::Ended { code: None },
                None => State::Over {
                    told: "failed before it ran, or with its node: the head's dashboard says why",
                },
            }),
            "STOPPED" => Some(State::Over { told: "was stopped" }),
            _ => None,
        }
    }
}

async fn read(mut response: Response) -> Result<Vec<u8>, Answer> {
    let mut text = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if (text.len() + chunk.len()) as u64 > LARGEST => {
                return Err(Answer::None(format!("an answer of more than {LARGEST} bytes")));
            }
            Ok(Some(chunk)) => text.extend_from_slice(&chunk),
            Ok(None) => return Ok(text),
            Err(error) => return Err(Answer::None(causes(&error))),
        }
    }
}

fn causes(error: &reqwest::Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}
