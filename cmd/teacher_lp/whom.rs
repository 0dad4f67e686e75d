//! Who teacher and student are: what the flags say, what can be known without
//! asking anybody, and whether they fit the policy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::engine;
use oclaw::engine::{Dialect, Engine, EngineOptions, Pool, VLLM_MOST_TOP};
use oclaw::template::{Chat, Tokenizer};
use serde_json::Value;

use super::Args;
use crate::answers::Answers;
use crate::common::Context;
use crate::report::Failure;
use crate::servers::teller;

/// Returns who teacher and student are, as far as that is known without asking.
pub(super) async fn known(
    args: &Args,
    answers: &Answers,
) -> anyhow::Result<(Option<Value>, Option<Value>)> {
    let of_folder = async |folder: &Path| match answers.any() {
        true => answers.of_folder(folder, &dtype(args)).await.map(Some),
        false => Ok(None),
    };
    let teacher = match (args.servers.any(), &args.model) {
        (true, _) => answers.last_met(args.servers.typed()),
        (false, Some(folder)) => of_folder(folder).await?,
        (false, None) => None,
    };
    let student = match (student_folder(args)?, &args.student) {
        (Some(folder), _) => of_folder(&folder).await?,
        (None, Some(url)) => {
            answers.last_met([(&*url.to_string_lossy(), args.student_model.as_deref())])
        }
        (None, None) => None,
    };
    Ok((teacher, student))
}

/// Tells whether everybody who is asked runs in this process.
pub(super) fn all_local(args: &Args) -> bool {
    !args.servers.any() && !args.student.as_deref().is_some_and(is_address)
}

pub(super) fn dtype(args: &Args) -> String {
    format!("{:?}", args.dtype).to_lowercase()
}

fn is_address(place: &Path) -> bool {
    place.to_string_lossy().contains("://")
}

pub(super) const SHARE: &str = "teacher and student must share the policy's vocabulary";

/// Returns the one folder of the student, if it is one and not a policy per turn.
pub(super) fn student_folder(args: &Args) -> anyhow::Result<Option<PathBuf>> {
    match (args.topk(), &args.student, &args.policy, &args.model) {
        (0, Some(_), ..) | (0, _, Some(_), _) => {
            Err(Failure::usage("a student has nothing to do under `--topk 0`").into())
        }
        (0, ..) | (_, None, Some(_), _) => Ok(None),
        (_, Some(place), ..) if is_address(place) => Ok(None),
        (_, Some(folder), ..) | (_, None, None, Some(folder)) => Ok(Some(folder.clone())),
        (_, None, None, None) => Err(Failure::usage("`--topk` needs a student")
            .hint("give `--policy DIR`, the folder that `train` fills, or `--student DIR|URL`")
            .into()),
    }
}

/// Connects to servers of one model and has each score two tokens, so that what
/// cannot score at all says so now and not once per hint. Says what they cannot do.
pub(super) async fn connect(
    options: Vec<EngineOptions>,
    topk: u16,
    chat: &Chat,
    context: &Context,
) -> anyhow::Result<Pool> {
    let pool = Pool::connect(options, teller(context)).await?;
    let probe = probe(topk, chat)?;
    // The pool's own call is as patient as any other.
    pool.call(async |engine: &Engine| engine.score(&probe).await).await.map_err(unable)?;
    let engines = pool.engines();
    for engine in &engines {
        if engines.len() > 1 {
            match engine.score(&probe).await {
                // Left out when it is asked.
                Err(error) if error.is_transient() => {}
                tried => drop(tried.map_err(unable)?),
            }
        }
        if topk > 0 && engine.dialect() == Dialect::Vllm {
            context.say(format!(
                "`{}` tells the {VLLM_MOST_TOP} likeliest tokens only: a hint is unusable where the student's are others",
                engine.url()
            ));
        }
    }
    Ok(pool)
}

fn unable(error: engine::Error) -> anyhow::Error {
    match error {
        error @ engine::Error::Unsupported { .. } => Failure::usage(error.to_string())
            .hint("SGLang, vLLM, `oclaw engine` and a model folder can")
            .into(),
        error => error.into(),
    }
}

/// Returns the request that a server is tried with.
pub(super) fn probe(topk: u16, chat: &Chat) -> anyhow::Result<engine::ScoreRequest> {
    let ids = chat.tokenizer.encode("one two three")?;
    let chosen = if topk > 0 { ids[1..].to_vec() } else { Vec::new() };
    Ok(engine::ScoreRequest { ids, start: 1, top_k: topk.into(), chosen })
}

/// So many of the likeliest tokens are recorded if nobody says how many.
const TOPK: u16 = 4;

impl Args {
    /// Returns how many of the likeliest tokens are recorded: by default some, if there is
    /// a student.
    pub(super) fn topk(&self) -> u16 {
        let student = [&self.student, &self.policy, &self.model].iter().any(|it| it.is_some());
        self.topk.unwrap_or(if student { TOPK } else { 0 })
    }

    pub(super) fn options(&self, url: &str) -> EngineOptions {
        let mut options = EngineOptions::new(url);
        options.timeout = Duration::from_secs(self.timeout);
        options.retries.tries = self.retries.saturating_add(1);
        options
    }
}

pub(super) fn same_tokenizer(folder: &Path, hash: &str) -> Result<(), String> {
    let tokenizer = Tokenizer::load(folder).map_err(|error| error.to_string())?;
    match tokenizer.hash() == hash {
        true => Ok(()),
        false => Err(format!("the tokenizer of `{}` is another", folder.display())),
    }
}

/// Returns a folder's own name, whatever link led there.
pub(super) fn folder_name(folder: &Path) -> String {
    let real = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    real.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the step of a policy's folder, or the name of another.
pub(super) fn version_of(folder: &Path) -> String {
    let name = folder_name(folder);
    let step = name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok());
    step.map_or(name, |step| step.to_string())
}
