//! Jobs of a Ray cluster, by the Jobs API of its head.
//!
//! A job's id there is made of the loop and the job, so that a submission whose
//! answer was lost finds the job that it made. A head that does not answer is no
//! news of a job: [`Ray::poll`] errors, and the caller asks again.

mod log;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Client, Method, Response, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};

use self::log::Text;
use super::taken::Taking;
use super::{Error, Job, State, quoting};

/// Longest wait for an answer of the head.
const ANSWER: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(5);
/// A head that did not answer for that long is left alone for so long: else each process
/// of a loop would wait for it in turn, and nobody would hear a signal meanwhile.
const QUIET: Duration = Duration::from_secs(5);
/// Time that a job gets to end by itself, in seconds. Ray's own is three.
const STOP_WAIT: &str = "60";
/// Largest answer, but for a log.
const LARGEST: u64 = 8 << 20;
/// Longest time that a log may take to come. What has come by then stays.
const LOG: Duration = Duration::from_secs(60);
/// A head sends a log whole, each time. One of so many bytes is asked for every
/// second at most, a longer one as much less often.
const LOG_PER_SECOND: u64 = 1 << 20;

/// The head of a cluster.
#[derive(Debug)]
pub struct Ray {
    client: Client,
    base: String,
    scope: String,
    /// Jobs of which nobody knows whether they were submitted, by name.
    unsure: HashMap<String, String>,
    /// The job that had a name last, and until when its log is not asked for.
    logs_rest: HashMap<String, (String, Instant)>,
    /// Until when a head that hangs is left alone, and what is told of it.
    hung: Mutex<Option<(Instant, String)>>,
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
        let (unsure, logs_rest) = (HashMap::new(), HashMap::new());
        Ok(Self { client, base, scope, unsure, logs_rest, hung: Mutex::default() })
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
        // What has become of it is asked at once, also of a head that took long.
        self.hung = Mutex::default();
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
        let state = told.state().ok_or_else(|| Error::Scheduler {
            whom: self.base.clone(),
            problem: format!("job `{}` is `{}`, which is no state", job.name, told.status),
        })?;
        if !state.is_alive() {
            // The end of its log is wanted now.
            self.logs_rest.remove(&job.name);
        }
        Ok(state)
    }

    /// Appends what is new of a job's log to its file. A long one is not asked for
    /// each time, unless the job is known to have ended.
    pub async fn logs(&mut self, job: &Job) -> Result<(), Error> {
        let rest = self.logs_rest.get(&job.name).filter(|(id, _)| *id == job.id);
        if rest.is_some_and(|(_, until)| Instant::now() < *until) {
            return Ok(());
        }
        let length = match self.take_log(job).await? {
            Some(length) => length,
            None => self.take_log(job).await?.unwrap_or_default(),
        };
        let until = Instant::now() + Duration::from_secs(length / LOG_PER_SECOND);
        self.logs_rest.insert(job.name.clone(), (job.id.clone(), until));
        Ok(())
    }

    /// Takes a log as it comes, and returns its length; nothing if it has to come again.
    async fn take_log(&self, job: &Job) -> Result<Option<u64>, Error> {
        let none = |error: reqwest::Error| self.failed(Answer::None(causes(&error)));
        let url = format!("{}/api/jobs/{}/logs", self.base, self.id(&job.id));
        self.check_hung().map_err(|answer| self.failed(answer))?;
        let mut response = self.client.get(url).timeout(LOG).send().await.map_err(none)?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Ok(Some(0)),
            status => {
                let text = read(response).await.map_err(|answer| self.failed(answer))?;
                let text = String::from_utf8_lossy(&text).into_owned();
                return Err(self.failed(Answer::Refused(status.as_u16(), text)));
            }
        }
        let (mut text, mut taking) = (Text::default(), Taking::new(job));
        let come = loop {
            match response.chunk().await {
                Ok(Some(chunk)) => {
                    if let Err(error) = taking.take(&text.read(&chunk)) {
                        break Err(error);
                    }
                }
                Ok(None) if text.is_whole() => break Ok(()),
                Ok(None) => {
                    let problem = "its answer is no log: is it a Ray head?".to_owned();
                    break Err(self.failed(Answer::None(problem)));
                }
                Err(error) => break Err(none(error)),
            }
        };
        let length = taking.end(come.is_ok());
        come.and(length)
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
        self.check_hung()?;
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.map_err(|error| self.unanswered(&error))?;
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

    /// Tells why there is no answer. Of a head that hangs it is told again for a while.
    fn unanswered(&self, error: &reqwest::Error) -> Answer {
        let problem = causes(error);
        if error.is_timeout() {
            let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
            *hung = Some((Instant::now() + QUIET, problem.clone()));
        }
        Answer::None(problem)
    }

    /// Errors while a head that hangs is left alone.
    fn check_hung(&self) -> Result<(), Answer> {
        match &*self.hung.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((until, told)) if Instant::now() < *until => Err(Answer::None(told.clone())),
            _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_head_that_hangs_is_waited_for_once() {
        let mut ray = Ray::new("http://127.0.0.1:1", "scope", None).unwrap();
        // It takes connections, and nobody reads them.
        let head = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", head.local_addr().unwrap());
        let client = Client::builder().no_proxy().timeout(Duration::from_millis(1));
        let error = client.build().unwrap().get(url).send().await.unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let _ = ray.unanswered(&error);
        let told = ray.version().await.unwrap_err().to_string();
        assert!(told.ends_with(&causes(&error)), "{told}");
        // It is asked again later.
        ray.hung = Mutex::new(Some((Instant::now(), causes(&error))));
        let told = ray.version().await.unwrap_err().to_string();
        assert!(!told.ends_with(&causes(&error)), "{told}");
    }
}
