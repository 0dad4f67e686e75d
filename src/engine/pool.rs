//! Several servers of one model, as if they were one.
//!
//! A call goes to the server that has the fewest under way. One that is gone is
//! left out for a while, as long as a failed call waits and longer each time, and
//! then tried by a single call. What a server says about the question is final: any
//! other would say the same.

mod member;
mod weights;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures_util::future::join_all;

use member::{Member, UnderWay};

use super::retry::{self, Retries};
use super::{Dialect, Engine, EngineOptions, Error};

/// So many failures in a row make a server that can be reached one that is gone.
const IN_A_ROW: u32 = 3;

/// What becomes known of a server while it is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// It is left out.
    Gone {
        /// Why.
        reason: String,
    },
    /// It answers again.
    Back {
        /// The server.
        url: String,
    },
}

/// Hears the news. Each server's going and coming back is told once.
pub type Tell = Box<dyn Fn(News) + Send + Sync>;

/// What one server did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// The server.
    pub url: String,
    /// Calls that it was sent.
    pub calls: u64,
    /// Those of them that it did not answer.
    pub failed: u64,
    /// Whether it is left out now.
    pub gone: bool,
}

/// Servers of one model.
pub struct Pool {
    members: Vec<Member>,
    retries: Retries,
    same: Mutex<Same>,
    tell: Tell,
}

/// What all servers have in common.
#[derive(Debug, Clone, Default)]
struct Same {
    /// The server that the others are held against.
    url: String,
    model: Option<String>,
    dialects: Vec<Dialect>,
    weights: Option<String>,
    /// What was told last, maybe by who is away now.
    expected: Option<String>,
}

impl Pool {
    /// Connects to servers, which must serve the same model. Those that are away
    /// are left out and tried again later; if all are, it is the error of the first.
    pub async fn connect(options: Vec<EngineOptions>, tell: Tell) -> Result<Self, Error> {
        let several = options.len() > 1;
        let once = |options: &EngineOptions| {
            let retries = if several { Retries::none() } else { options.retries.clone() };
            EngineOptions { retries, ..options.clone() }
        };
        let mut connected = join_all(options.iter().map(once).map(Engine::connect)).await;
        // One that is there is enough to begin with; none is worth some patience.
        if several && connected.iter().all(|engine| engine.as_ref().is_err_and(Error::is_transient))
        {
            connected = join_all(options.iter().cloned().map(Engine::connect)).await;
        }
        let pool = Self::unconnected(options, tell);
        let mut first = None;
        for (member, engine) in pool.members.iter().zip(connected) {
            match engine {
                Ok(engine) => pool.welcome(member, engine)?,
                Err(error) if error.is_transient() => {
                    if pool.members.len() > 1 {
                        pool.rest(member, &error);
                    }
                    first.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        match first {
            Some(error) if pool.engines().is_empty() => Err(error),
            _ => Ok(pool),
        }
    }

    /// Returns servers that nobody has spoken to yet. There must be one.
    pub fn unconnected(options: Vec<EngineOptions>, tell: Tell) -> Self {
        let retries = options.first().map_or_else(Retries::none, |first| first.retries.clone());
        let members = options.into_iter().map(Member::new).collect();
        Self { members, retries, same: Mutex::default(), tell }
    }

    /// Returns the servers that were reached, whether or not they still are there.
    pub fn engines(&self) -> Vec<Engine> {
        self.members.iter().filter_map(|member| member.state().engine.clone()).collect()
    }

    /// Returns the addresses of those servers, as they were given.
    pub fn reached(&self) -> Vec<&str> {
        let met = |member: &&Member| member.state().engine.is_some();
        self.members.iter().filter(met).map(|member| member.options.url.as_str()).collect()
    }

    /// Returns the name of the model.
    pub fn model(&self) -> Option<String> {
        self.same().model.clone()
    }

    /// Returns the dialects that are spoken, each once.
    pub fn dialects(&self) -> Vec<Dialect> {
        self.same().dialects.clone()
    }

    /// Takes a version of the weights for theirs as long as nobody tells one and some
    /// server was not reached yet. One that comes late with another is left out.
    pub fn expect_weights(&self, version: &str) {
        let version = Some(version.to_owned());
        let mut same = self.same();
        same.expected.clone_from(&version);
        same.weights = version;
    }

    /// Tells whether nobody can be reached any more.
    pub fn is_gone(&self) -> bool {
        self.members.iter().all(|member| member.state().gone)
    }

    /// Tells what each server did.
    pub fn accounts(&self) -> Vec<Account> {
        self.members.iter().map(Member::account).collect()
    }

    /// Makes a call. A try is a round of the servers: each that is there, and if
    /// none is, each of those that are gone.
    pub async fn call<T>(
        &self,
        ask: impl AsyncFn(&Engine) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut rounds = 0;
        loop {
            let mut tried = vec![false; self.members.len()];
            let mut last = None;
            while let Some(at) = self.pick(&tried) {
                tried[at] = true;
                match self.ask(&self.members[at], &ask).await {
                    Ok(value) => return Ok(value),
                    Err(Failed::Question(error)) => return Err(error),
                    Err(Failed::Server(error)) => last = Some(error),
                }
            }
            rounds += 1;
            let Some(error) = last else {
                let reason = "there is no server to call".to_owned();
                return Err(Error::Client { url: String::new(), reason });
            };
            if !error.is_transient() {
                return Err(error);
            }
            let Some(wait) = self.retries.wait(rounds, error.retry_after(), retry::share()) else {
                return Err(error);
            };
            tracing::info!(%error, rounds, wait = wait.as_secs_f64(), "trying again");
            tokio::time::sleep(wait).await;
        }
    }

    /// Chooses whom to ask among those that were not asked yet.
    fn pick(&self, tried: &[bool]) -> Option<usize> {
        let now = Instant::now();
        let mut awake = None;
        let mut resting = None;
        let mut any_awake = false;
        for (at, member) in self.members.iter().enumerate() {
            match member.state().rest.filter(|until| *until > now) {
                None => {
                    any_awake = true;
                    let load = member.under_way.load(Ordering::Relaxed);
                    let load = (load, member.calls.load(Ordering::Relaxed));
                    if !tried[at] && awake.is_none_or(|(least, _)| load < least) {
                        awake = Some((load, at));
                    }
                }
                Some(until) => {
                    if !tried[at] && resting.is_none_or(|(soonest, _)| until < soonest) {
                        resting = Some((until, at));
                    }
                }
            }
        }
        let at = match awake {
            Some((_, at)) => at,
            None if any_awake => return None,
            None => resting?.1,
        };
        let mut state = self.members[at].state();
        // Whoever wakes one up does so alone.
        if state.rest.is_some() {
            state.rest = Some(now + state.pause.unwrap_or(self.retries.first_wait));
        }
        Some(at)
    }

    async fn ask<T>(
        &self,
        member: &Member,
        ask: &impl AsyncFn(&Engine) -> Result<T, Error>,
    ) -> Result<T, Failed> {
        let _under_way = UnderWay::of(member);
        member.calls.fetch_add(1, Ordering::Relaxed);
        let known = member.state().engine.clone();
        let engine = match known {
            Some(engine) => engine,
            None => match self.late(member).await {
                Ok(engine) => engine,
                Err(error) => {
                    member.failed.fetch_add(1, Ordering::Relaxed);
                    self.rest(member, &error);
                    return Err(Failed::Server(error));
                }
            },
        };
        let error = match ask(&engine).await {
            Ok(value) => {
                self.answered(member);
                return Ok(value);
            }
            Err(error) => error,
        };
        let several = self.members.len() > 1;
        // What another server may well do.
        let its_own = matches!(error, Error::Unauthorized { .. } | Error::Unsupported { .. });
        if error.is_transient() || several && its_own {
            member.failed.fetch_add(1, Ordering::Relaxed);
            self.rest(member, &error);
            return Err(Failed::Server(error));
        }
        self.answered(member);
        Err(Failed::Question(error))
    }

    /// Connects to a server that was away at the start.
    async fn late(&self, member: &Member) -> Result<Engine, Error> {
        let options = EngineOptions { retries: Retries::none(), ..member.options.clone() };
        let engine = Engine::connect(options).await?;
        let weights = match engine.weight_version().await {
            // One that may carry others must not be taken for one that tells none.
            Err(error) if error.is_transient() => return Err(error),
            told => told.ok().flatten(),
        };
        let same = self.same().clone();
        if let (Some(has), Some(wanted)) = (&weights, &same.weights)
            && has != wanted
        {
            // From the next table on, if nobody tells another.
            self.same().expected.clone_from(&weights);
            return Err(Error::Unlike {
                url: engine.url(),
                has: format!("carries the weights `{has}`"),
                other: same.url.clone(),
                wanted: format!("carried `{wanted}`"),
            });
        }
        self.welcome(member, engine.clone())?;
        Ok(engine)
    }

    /// Takes in a server, which must serve what the others do.
    fn welcome(&self, member: &Member, engine: Engine) -> Result<(), Error> {
        {
            let mut same = self.same();
            let model = engine.model().map(str::to_owned);
            if same.dialects.is_empty() {
                (same.url, same.model) = (engine.url(), model);
            } else if same.model != model {
                let name = |model: &Option<String>| model.clone().unwrap_or_default();
                return Err(Error::Unlike {
                    url: engine.url(),
                    has: format!("serves `{}`", name(&model)),
                    other: same.url.clone(),
                    wanted: format!("serves `{}`", name(&same.model)),
                });
            }
            if !same.dialects.contains(&engine.dialect()) {
                same.dialects.push(engine.dialect());
                same.dialects.sort_by_key(|dialect| dialect.as_str());
            }
        }
        // A try of ours is a round of all servers, so a server's own is one call.
        member.state().engine = Some(engine.with_retries(Retries::none()));
        Ok(())
    }

    fn answered(&self, member: &Member) {
        let back = {
            let mut state = member.state();
            (state.rest, state.pause, state.in_a_row, state.gone) = (None, None, 0, false);
            state.told_gone && !std::mem::replace(&mut state.told_back, true)
        };
        if back {
            (self.tell)(News::Back { url: member.url() });
        }
    }

    /// Leaves out a server that failed, if it is gone or asks for it, and if there
    /// are others.
    fn rest(&self, member: &Member, error: &Error) {
        let told = {
            let mut state = member.state();
            state.in_a_row += 1;
            let unreachable = matches!(error, Error::Unreachable { .. });
            state.gone = unreachable;
            if self.members.len() == 1 {
                return;
            }
            let never_there = state.engine.is_none();
            let ended =
                never_there || unreachable || !error.is_transient() || state.in_a_row >= IN_A_ROW;
            if ended {
                let Retries { first_wait, longest_wait, .. } = self.retries;
                let pause = state.pause.map_or(first_wait, |pause| (pause * 2).min(longest_wait));
                (state.pause, state.rest) = (Some(pause), Some(Instant::now() + pause));
            }
            if let Some(asked) = error.retry_after() {
                state.rest =
                    state.rest.max(Some(Instant::now() + asked.min(self.retries.longest_wait)));
            }
            ended && !std::mem::replace(&mut state.told_gone, true)
        };
        if told {
            (self.tell)(News::Gone { reason: error.to_string() });
        }
    }

    fn same(&self) -> MutexGuard<'_, Same> {
        self.same.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_list().entries(self.accounts()).finish()
    }
}

/// Whose fault a failure is.
enum Failed {
    Question(Error),
    Server(Error),
}
