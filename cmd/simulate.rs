//! `oclaw simulate`.

mod rates;
mod told;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use oclaw::engine::{Engine, EngineOptions};
use oclaw::simulate::{Asking, Person, Persona, Questions, Visit};
use tokio::time::Instant;

use crate::common::Context;
use crate::embedded;
use crate::report::{Exit, Failure};
use crate::units;

/// Time between two looks for a newer policy.
const LOOK: Duration = Duration::from_millis(500);

/// Let a made-up person talk to an agent, and tell after how many sessions it adapted.
///
/// A persona is a TOML file: a wish, a rule that tells whether a reply fulfils it, and
/// what the person says of replies that do and that do not. A session opens with a
/// question. If the reply obeys, the person praises it and leaves; else they complain
/// and wait for another one, `turns` replies at most. Which question and which phrasing
/// it is, the seed decides. The last words of a session are sent too, so that they are
/// the next state of what they are about.
///
///     name = "brief"
///     wish = "One sentence, no more."
///     turns = 2              # replies that they wait for; default: 2
///     max-tokens = 64        # of a reply; default: 64
///     [rule]                 # all of what stands here must hold
///     sentences = { max = 1 }
///     finished = true        # it came to its end
///     [says]
///     broken = ["No, answer in one sentence."]
///     holds = ["Thanks, that is what I wanted."]
///
/// Rules: `regex`; `tokens`, `chars`, `words`, `sentences`, `lines` with `min` and
/// `max`; `form` (bold, numbered-list, bullets, boxed, lower-case, upper-case, emoji,
/// json); `finished`; and of rules, `not`, `all` and `any`.
///
/// What counts is the first reply of each session: the agent adapted at the first of
/// three sessions in a row whose first replies obey. A CSV line per session goes to
/// OUT: session, id, question, policy (version of the weights, if the server tells),
/// obeyed, content (whether the last reply obeyed), replies, tokens (of the first
/// reply) and all_tokens, seconds since the start, and with `--keep-replies` the reply.
///
/// An agent that learns needs time: with `--sessions-per-policy 8` a newer policy is
/// waited for after every eight sessions. It is asked for by a request that is not
/// recorded. `--until-adapted` looks after each such round, or without rounds after
/// each `--at-once` sessions, whether three in a row have obeyed.
///
/// With `--person-engine` a model gives the person words; whether a reply obeys is the
/// rule's to say all the same.
///
/// `--base-rates` asks `--sessions` questions twice, bare and with one of the person's
/// complaints as a hint, as the teacher is shown it, and records nothing: the share of
/// replies that obey. A persona has room to learn on a model if that is at most 0.3
/// bare and at least 0.2 hinted.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// File of the person
    #[arg(long, value_name = "FILE")]
    persona: PathBuf,
    /// Address of the agent: an `oclaw serve`, or an engine
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:30000")]
    engine: String,
    /// Name of the model there, if it has several
    #[arg(long, value_name = "NAME")]
    engine_model: Option<String>,
    /// File with the key of the agent
    #[arg(long, value_name = "FILE")]
    engine_key_file: Option<PathBuf>,
    /// Files with a `question` in each object, JSON or JSON Lines
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    questions: Vec<PathBuf>,
    /// Sessions, or questions with `--base-rates`
    #[arg(long, value_name = "N", default_value_t = 36, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sessions: u32,
    /// Sessions at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    at_once: u32,
    /// Sessions after which a newer policy is waited for [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "base_rates")]
    sessions_per_policy: Option<u32>,
    /// Longest wait for a newer policy
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = units::duration, requires = "sessions_per_policy")]
    policy_timeout: Duration,
    /// End after the round of sessions in which the agent has adapted
    #[arg(long, conflicts_with = "base_rates")]
    until_adapted: bool,
    /// Sampling temperature
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = units::temperature)]
    temperature: f64,
    /// Address of an engine that gives the person words
    #[arg(long, value_name = "URL", conflicts_with = "base_rates")]
    person_engine: Option<String>,
    /// Measure how often replies obey, bare and with a hint
    #[arg(long)]
    base_rates: bool,
    /// Write the first replies, too
    #[arg(long)]
    keep_replies: bool,
    /// File to write, whole or not at all [default: standard output]
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
}

impl Args {
    /// Refuses rounds that nothing comes after: no newer policy would be met.
    fn check(&self) -> anyhow::Result<()> {
        let (sessions, round) = (self.sessions, self.sessions_per_policy.unwrap_or(0));
        if round < sessions {
            return Ok(());
        }
        let problem = format!(
            "`--sessions-per-policy {round}` of {sessions} sessions: no newer policy would be met"
        );
        Err(Failure::usage(problem).hint("give fewer sessions per policy, or leave it out").into())
    }

    /// Returns after how many sessions there is something to look for: a newer policy, or
    /// whether the agent has adapted.
    fn round(&self) -> usize {
        let unless_told = if self.until_adapted { self.at_once } else { self.sessions };
        self.sessions_per_policy.unwrap_or(unless_told) as usize
    }
}

/// Talks.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    args.check()?;
    let persona = Persona::load(&args.persona)?;
    let questions = Questions::load(&args.questions, context.seed)?;
    context.block_on(async {
        let key = embedded::key(&context.command, args.engine_key_file.as_deref())?;
        let model = args.engine_model.clone();
        let options = EngineOptions { key, model, ..EngineOptions::new(&args.engine) };
        let agent = Engine::connect(options).await?;
        let voice = match &args.person_engine {
            Some(url) => Some(Engine::connect(EngineOptions::new(url)).await?),
            None => None,
        };
        let asking = Asking { temperature: args.temperature, seed: context.seed };
        let person = Person { persona: &persona, agent: &agent, voice: voice.as_ref(), asking };
        if args.base_rates {
            return rates::measure(&args, (&person, &questions), context).await;
        }
        let visits = visits(&args, (&person, &questions), context).await?;
        told::visits(&args, &persona, &visits, context)
    })
}

/// A session, and when it was over.
struct Timed {
    visit: Visit,
    seconds: f64,
}

/// Holds the sessions, in rounds if newer policies are waited for.
async fn visits(
    args: &Args,
    (person, questions): (&Person<'_>, &Questions),
    context: &Context,
) -> anyhow::Result<Vec<Timed>> {
    let began = Instant::now();
    // Sessions of another run at the same agent are other sessions.
    let run = uuid::Uuid::now_v7();
    let all: Vec<usize> = (1..=args.sessions as usize).collect();
    let mut visits: Vec<Timed> = Vec::new();
    let mut policy = None;
    for (number, sessions) in all.chunks(args.round()).enumerate() {
        if args.sessions_per_policy.is_some() {
            policy = Some(match number {
                0 => told_policy(person).await?,
                _ => newer_policy(args, person, policy).await?,
            });
        }
        let held = stream::iter(sessions.iter().map(|session| async move {
            let id = format!("{}-{run}-{session:04}", person.persona.name);
            let visit = person.visit(*session, &id, questions.of(session - 1)).await?;
            anyhow::Ok(Timed { visit, seconds: began.elapsed().as_secs_f64() })
        }));
        let held: Vec<Timed> = held.buffered(args.at_once as usize).try_collect().await?;
        let obeyed = held.iter().filter(|timed| timed.visit.obeyed).count();
        visits.extend(held);
        context.say(format!(
            "session {} of {}: the first reply obeyed in {obeyed} of the last {}",
            visits.len(),
            args.sessions,
            sessions.len()
        ));
        if args.until_adapted && told::adapted(&visits).is_some() {
            break;
        }
    }
    Ok(visits)
}

/// Waits until the agent's policy is another one than before.
async fn newer_policy(
    args: &Args,
    person: &Person<'_>,
    before: Option<String>,
) -> anyhow::Result<String> {
    let began = Instant::now();
    loop {
        let now = told_policy(person).await?;
        if before.as_ref() != Some(&now) {
            return Ok(now);
        }
        if began.elapsed() > args.policy_timeout {
            let waited = args.policy_timeout.as_secs();
            let problem = format!("no newer policy than `{now}` within {waited} s");
            return Err(Failure::failed(problem)
                .hint("is a loop training on these sessions? `oclaw loop --status RUN` tells")
                .into());
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn told_policy(person: &Person<'_>) -> anyhow::Result<String> {
    let told = person.policy().await?;
    told.with_context(|| format!("`{}` does not tell its policy", person.agent.url()))
}
