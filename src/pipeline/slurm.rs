//! Jobs of a Slurm cluster, by its commands: `sbatch`, `squeue`, `sacct`,
//! `scancel`.
//!
//! A job is known by its name, which is made of the loop and the job, so that a
//! submission whose answer was lost finds the job that it made. A controller that
//! does not answer is no news of a job: [`Slurm::poll`] errors.
//!
//! Each call of `squeue` is one to a controller that all users share: one tells of all
//! jobs of a loop.

mod states;

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::{Error, Job, State, process, quoting};

/// Longest wait for one of the commands.
const ANSWER: Duration = Duration::from_secs(60);
/// The accounting lags behind the queue: so many looks may find nothing in either.
const LOOKS: u32 = 5;

/// A cluster, as its commands show it.
#[derive(Debug)]
pub struct Slurm {
    /// Where the commands are; nothing: on the search path.
    folder: Option<PathBuf>,
    partition: Option<String>,
    /// Further arguments to `sbatch`.
    arguments: Vec<String>,
    scope: String,
    /// Numbers of jobs by id, and how often a job was in no list.
    known: HashMap<String, (u64, u32)>,
    /// Jobs of which nobody knows whether they were submitted, by name.
    unsure: HashMap<String, String>,
    /// What the queue showed at the latest look, until something is changed in it.
    seen: Option<Seen>,
}

/// A look at the queue: its jobs by number, or what the command said.
type Seen = Result<HashMap<u64, Queued>, String>;

/// A job in the queue. Some that have ended stay there for minutes.
#[derive(Debug, Clone)]
struct Queued {
    title: String,
    state: Option<State>,
}

impl Slurm {
    /// Prepares to use a cluster. `scope` sets the jobs of one loop apart from those
    /// of another; `arguments` go to `sbatch` (`--time=1-0`, `--account=x`).
    pub fn new(partition: Option<String>, arguments: Vec<String>, scope: &str) -> Self {
        Self {
            folder: None,
            partition,
            arguments,
            scope: quoting::scope(scope),
            known: HashMap::new(),
            unsure: HashMap::new(),
            seen: None,
        }
    }

    /// Takes the commands from a folder.
    pub fn with_commands(self, folder: PathBuf) -> Self {
        Self { folder: Some(folder), ..self }
    }

    /// Asks which version it is: whether all of its commands are there, and the
    /// controller answers.
    pub async fn version(&mut self) -> Result<String, Error> {
        let mut version = String::new();
        for program in ["sbatch", "squeue", "sacct", "scancel"] {
            version = self.run(program, &["--version"], None).await?;
        }
        self.look().await?;
        Ok(version.trim().to_owned())
    }

    /// Looks at the queue once for all jobs.
    pub async fn look(&mut self) -> Result<(), Error> {
        let arguments = ["-h", "--me", "-t", "all", "-o", "%i|%T|%j"];
        let told = self.run("squeue", &arguments, None).await;
        let ours = self.title("");
        let read = |line: &str| {
            let mut columns = line.trim().splitn(3, '|');
            let number = columns.next()?.parse().ok()?;
            let state = states::read(columns.next()?, "");
            let title = columns.next()?.to_owned();
            title.starts_with(&ours).then_some((number, Queued { title, state }))
        };
        self.seen = Some(match &told {
            Ok(text) => Ok(text.lines().filter_map(read).collect()),
            Err(Error::Scheduler { problem, .. }) => Err(problem.clone()),
            Err(_) => Err("it cannot be run".to_owned()),
        });
        told.map(drop)
    }

    /// Submits a job. One of the same id that is there already is taken up.
    pub async fn start(&mut self, job: &Job) -> Result<(), Error> {
        if let Some(before) = self.unsure.get(&job.name).cloned() {
            self.seen = None;
            // What was submitted, or not, shall not run beside this one.
            if let Some(number) = self.find(&before).await? {
                if before == job.id {
                    self.unsure.remove(&job.name);
                    return Ok(());
                }
                self.cancel(number, false).await?;
            }
            self.unsure.remove(&job.name);
        }
        if self.find(&job.id).await?.is_some() {
            return Ok(());
        }
        let mut arguments = vec![
            "--parsable".to_owned(),
            format!("--job-name={}", self.title(&job.id)),
            format!("--chdir={}", job.folder.display()),
            format!("--output={}", pattern(&job.log.display().to_string())),
            "--open-mode=append".to_owned(),
            // The loop itself starts again what ends.
            "--no-requeue".to_owned(),
        ];
        arguments.extend(self.partition.iter().map(|name| format!("--partition={name}")));
        if !job.gpus.is_empty() {
            arguments.push(format!("--gpus={}", job.gpus.len()));
        }
        arguments.extend(self.arguments.iter().cloned());
        self.seen = None;
        self.unsure.insert(job.name.clone(), job.id.clone());
        let said = self.run("sbatch", &arguments, Some(&script(job))).await;
        // `NUMBER`, or `NUMBER;CLUSTER`.
        let number: Result<u64, Error> = said.and_then(|said| {
            let number = said.trim().split(';').next().and_then(|number| number.parse().ok());
            number.ok_or_else(|| problem("sbatch", format!("it said `{}`", said.trim())))
        });
        let found = match &number {
            Ok(number) => Some(*number),
            // It may have been taken all the same.
            Err(_) => self.find(&job.id).await?,
        };
        self.unsure.remove(&job.name);
        let Some(found) = found else { return number.map(drop) };
        self.known.insert(job.id.clone(), (found, 0));
        Ok(())
    }

    /// Says how a job is. Errors if the controller does not.
    pub async fn poll(&mut self, job: &Job) -> Result<State, Error> {
        let Some(number) = self.find(&job.id).await? else { return Ok(State::Lost) };
        let queued = match &self.seen {
            Some(Ok(queue)) => queue.get(&number).and_then(|queued| queued.state),
            Some(Err(problem)) => return Err(self::problem("squeue", problem.clone())),
            None => self.queued(number).await?,
        };
        if let Some(state @ (State::Pending | State::Running)) = queued {
            self.known.insert(job.id.clone(), (number, 0));
            return Ok(state);
        }
        let number_text = number.to_string();
        let columns = "State,ExitCode";
        let arguments = ["-X", "-n", "-P", "-j", &number_text, "-o", columns];
        let told = match self.run("sacct", &arguments, None).await {
            Err(Error::Scheduler { problem, .. }) if states::has_no_accounts(&problem) => {
                return Ok(queued.unwrap_or(State::Lost));
            }
            told => told?,
        };
        if let Some((word, code)) = told.lines().find_map(|line| line.trim().split_once('|')) {
            return states::read(word, code)
                .ok_or_else(|| problem("sacct", format!("`{word}` is no state that is known")));
        }
        let looks = self.known.get(&job.id).map_or(0, |(_, looks)| *looks) + 1;
        self.known.insert(job.id.clone(), (number, looks));
        Ok(if looks < LOOKS { State::Pending } else { queued.unwrap_or(State::Lost) })
    }

    /// Does nothing: the job writes its log itself, on the shared file system.
    pub async fn logs(&mut self, _job: &Job) -> Result<(), Error> {
        Ok(())
    }

    /// Asks a job to end, or ends it at once. One that has ended is left alone.
    pub async fn stop(&mut self, job: &Job, at_once: bool) -> Result<(), Error> {
        match self.find(&job.id).await? {
            Some(number) => self.cancel(number, at_once).await,
            None => Ok(()),
        }
    }

    /// A signal reaches what runs; what waits is taken away.
    async fn cancel(&mut self, number: u64, at_once: bool) -> Result<(), Error> {
        let state = self.queued(number).await?;
        self.seen = None;
        let number = number.to_string();
        let ended = match state {
            Some(State::Pending) => self.run("scancel", &[number.as_str()], None).await,
            Some(State::Running) => {
                let signal = if at_once { "--signal=KILL" } else { "--signal=TERM" };
                self.run("scancel", &[signal, "--full", &number], None).await
            }
            _ => return Ok(()),
        };
        match ended {
            // It ended meanwhile.
            Err(Error::Scheduler { problem, .. }) if states::is_gone(&problem) => Ok(()),
            ended => ended.map(drop),
        }
    }

    /// Asks the queue about one job.
    async fn queued(&self, number: u64) -> Result<Option<State>, Error> {
        match self.run("squeue", &["-h", "-j", &number.to_string(), "-o", "%T"], None).await {
            Ok(text) => Ok(states::read(text.lines().next().unwrap_or_default().trim(), "")),
            // It has left the queue, and the controller has forgotten it.
            Err(Error::Scheduler { problem, .. }) if states::is_gone(&problem) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Finds the number of a job: what `sbatch` said, else by its name, in the queue
    /// or in the accounting.
    async fn find(&mut self, id: &str) -> Result<Option<u64>, Error> {
        if let Some((number, _)) = self.known.get(id) {
            return Ok(Some(*number));
        }
        let title = self.title(id);
        let name = format!("--name={title}");
        let mut found = match &self.seen {
            // The newest, if a job was requeued by hand.
            Some(Ok(queue)) => {
                let named = queue.iter().filter(|(_, queued)| queued.title == title);
                named.map(|(number, _)| *number).max()
            }
            Some(Err(problem)) => return Err(self::problem("squeue", problem.clone())),
            None => {
                let arguments = ["-h", "--me", "-t", "all", &name, "-o", "%i"];
                last_number(&self.run("squeue", &arguments, None).await?)
            }
        };
        if found.is_none() {
            let arguments = ["-X", "-n", "-P", "-S", "now-30days", &name, "-o", "JobID"];
            found = match self.run("sacct", &arguments, None).await {
                Err(Error::Scheduler { problem, .. }) if states::has_no_accounts(&problem) => None,
                told => last_number(&told?),
            };
        }
        if let Some(number) = found {
            self.known.insert(id.to_owned(), (number, 0));
        }
        Ok(found)
    }

    fn title(&self, id: &str) -> String {
        format!("oclaw-{}-{id}", self.scope)
    }

    async fn run(
        &self,
        program: &str,
        arguments: &[impl AsRef<str>],
        input: Option<&str>,
    ) -> Result<String, Error> {
        let path = self.folder.as_ref().map_or(PathBuf::from(program), |it| it.join(program));
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                Error::Command { program: program.to_owned(), source }
            }
            _ => problem(program, source.to_string()),
        };
        let mut command = Command::new(path);
        command.args(arguments.iter().map(AsRef::as_ref));
        let input = input.map(str::to_owned);
        let talk = tokio::task::spawn_blocking(move || talk(command, input));
        let output = talk.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        let output = output.map_err(failed)?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(problem(program, said.split_whitespace().collect::<Vec<_>>().join(" ")))
            }
        }
    }
}

/// Runs a command to its end, or ends it.
fn talk(mut command: Command, input: Option<String>) -> io::Result<Output> {
    command
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn()?;
    if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
        // Its own words say more than that it did not read ours.
        let _ = stdin.write_all(input.as_bytes());
    }
    let leader = child.id();
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || ended.send(child.wait_with_output()));
    end.recv_timeout(ANSWER).unwrap_or_else(|_| {
        process::signal(leader, true);
        Err(io::Error::other(format!("no answer in {} s", ANSWER.as_secs())))
    })
}

fn problem(program: &str, problem: String) -> Error {
    Error::Scheduler { whom: program.to_owned(), problem }
}

/// Returns the batch script of a job. Variables stand in it, not on a command line
/// that everybody can see.
fn script(job: &Job) -> String {
    let mut text = "#!/bin/sh\n".to_owned();
    for (name, value) in &job.env {
        text.push_str(&format!("export {name}={}\n", quoting::word_of(value)));
    }
    if job.gpus.is_empty() {
        text.push_str("export CUDA_VISIBLE_DEVICES=\n");
    }
    text.push_str(&quoting::command(job));
    text.push('\n');
    text
}

/// Returns a file name that `sbatch` does not read as a pattern.
fn pattern(path: &str) -> String {
    path.replace('%', "%%")
}

fn last_number(text: &str) -> Option<u64> {
    // The newest, if a job was requeued by hand.
    text.lines().filter_map(|line| line.trim().parse().ok()).max()
}
