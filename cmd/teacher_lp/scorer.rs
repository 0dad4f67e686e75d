//! Who computes the numbers: the teacher, and the student where the likeliest
//! tokens are wanted, each a model in this process or a server.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use comfy_table::Table;
use oclaw::engine;
use oclaw::engine::{Engine, EngineOptions, Pool};
use oclaw::stage::Tally;
use oclaw::teacher_lp::{Asked, ScoreRequest, Scores};
use oclaw::template::Chat;
use serde_json::Value;

use super::Args;
use super::keeper::Keeper;
use super::local::{Local, Policies};
use super::whom::{
    SHARE, connect, dtype, folder_name, probe, same_tokenizer, student_folder, version_of,
};
use crate::asking::absent::Absent;
use crate::away::Away;
use crate::common::Context;
use crate::embedded;
use crate::report::Failure;
use crate::servers;
use crate::spending::Meter;

/// Teacher and student.
pub(super) struct Scorer {
    name: String,
    teacher: Place,
    student: Student,
    local: Option<Local>,
    keeper: Keeper,
    dtype: String,
    /// Who the models of folders are, for the keeper.
    folders: RefCell<HashMap<PathBuf, Value>>,
    tokenizer_hash: String,
    /// Whether the tokenizer of a policy is ours, by its folder.
    tokenizers: RefCell<HashMap<PathBuf, Result<(), String>>>,
    /// What servers are tried with.
    probe: engine::ScoreRequest,
    away: Away,
    absent: Absent,
}

/// Where numbers are computed.
enum Place {
    Folder(PathBuf),
    /// Servers of one model, and who they are for the keeper.
    Servers(Pool, RefCell<Value>),
}

enum Student {
    /// Nobody asks for it.
    None,
    /// The policy that sampled the turn.
    Policies(Policies),
    /// The same for all turns; the name is recorded.
    Fixed(Place, String),
}

impl Scorer {
    /// Loads or connects to all who will be asked, and tries the servers.
    pub(super) async fn new(
        args: &Args,
        chat: &Chat,
        keeper: Keeper,
        context: &Context,
    ) -> anyhow::Result<Self> {
        let student_folder = student_folder(args)?;
        let needs_local = args.model.is_some() || student_folder.is_some() || args.policy.is_some();
        let local = needs_local.then(|| Local::start(args.dtype)).transpose()?;
        let teacher = match (args.servers.any(), &args.model) {
            (true, _) => {
                let options = args.servers.options(context, |url| args.options(&url))?;
                let pool = connect(options, args.topk, chat, context).await?;
                let whom = keeper.answers.of_pool(&pool, args.servers.typed()).await?;
                Place::Servers(pool, RefCell::new(whom))
            }
            (false, folder) => Place::Folder(folder.clone().unwrap_or_default()),
        };
        let student = match (&args.student, student_folder) {
            _ if args.topk == 0 => Student::None,
            (_, Some(folder)) => {
                let name = version_of(&folder);
                Student::Fixed(Place::Folder(folder), name)
            }
            (Some(url), None) => {
                let key =
                    args.student_key_file.as_deref().map(|file| embedded::key("", Some(file)));
                let options = EngineOptions {
                    key: key.transpose()?.flatten(),
                    model: args.student_model.clone(),
                    ..args.options(&url.to_string_lossy())
                };
                let pool = connect(vec![options], args.topk, chat, context).await?;
                let name = pool.model().unwrap_or_default();
                let url = url.to_string_lossy();
                let typed = [(&*url, args.student_model.as_deref())];
                let whom = keeper.answers.of_pool(&pool, typed.into_iter()).await?;
                Student::Fixed(Place::Servers(pool, RefCell::new(whom)), name)
            }
            (None, None) => {
                let policies = args.policy.clone().unwrap_or_default();
                Student::Policies(Policies::new(policies, args.model.clone()))
            }
        };
        let fixed = if let Student::Fixed(place, _) = &student { Some(place) } else { None };
        for place in std::iter::once(&teacher).chain(fixed) {
            if let (Place::Folder(folder), Some(local)) = (place, &local) {
                same_tokenizer(folder, &chat.tokenizer.hash())
                    .map_err(|what| Failure::failed(what).hint(SHARE))?;
                local.load(folder).await?;
            }
        }
        let name = match &teacher {
            Place::Folder(folder) => folder_name(folder),
            Place::Servers(pool, _) => pool.model().unwrap_or_default(),
        };
        Ok(Self {
            name,
            teacher,
            student,
            local,
            keeper,
            dtype: dtype(args),
            folders: RefCell::default(),
            tokenizer_hash: chat.tokenizer.hash(),
            tokenizers: RefCell::default(),
            probe: probe(args.topk, chat)?,
            away: Away::default(),
            absent: Absent::default(),
        })
    }

    /// Returns what counts the calls.
    pub(super) fn meter(&self) -> &Meter {
        &self.keeper.meter
    }

    /// Adds what was computed to a closing table.
    pub(super) fn rows(&self, table: &mut Table) {
        if let Some(local) = &self.local {
            let (scored, computed) = local.work();
            let share = format!("{computed} of {scored}");
            table.add_row(["tokens computed, of those to score".to_owned(), share]);
        }
        self.meter().rows(table);
        for (pool, _) in self.pools() {
            servers::rows(&pool.accounts(), table);
        }
    }

    /// Returns the teacher's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether everybody can divide logits by a temperature.
    pub(super) fn tempers(&self) -> bool {
        self.pools().next().is_none()
    }

    /// Scores one request by whom it asks.
    pub(super) async fn score(&self, mut request: ScoreRequest) -> Result<Scores, String> {
        let version = match &request.asked {
            Asked::Teacher => return self.at(&self.teacher, request).await,
            Asked::Student(version) => version.clone(),
        };
        match &self.student {
            Student::None => Err("there is none".to_owned()),
            Student::Fixed(place, name) => {
                let place = self.one_with_teacher(place, &mut request);
                let mut scores = self.at(place, request).await?;
                scores.version.get_or_insert_with(|| name.clone());
                Ok(scores)
            }
            Student::Policies(policies) => {
                let (step, folder) = policies.of(version.as_deref())?;
                self.check(&folder)?;
                let place = Place::Folder(folder);
                let place = self.one_with_teacher(&place, &mut request);
                let mut scores = self.at(place, request).await?;
                scores.version = Some(step);
                Ok(scores)
            }
        }
    }

    /// Returns the teacher's place if the student's is the same model. Another
    /// student cannot compute along what the teacher will be asked.
    fn one_with_teacher<'a>(&'a self, place: &'a Place, request: &mut ScoreRequest) -> &'a Place {
        let real = |place: &Place| match place {
            Place::Folder(folder) => std::fs::canonicalize(folder).ok(),
            Place::Servers(..) => None,
        };
        if real(place).is_some_and(|folder| real(&self.teacher) == Some(folder)) {
            return &self.teacher;
        }
        request.ahead.clear();
        place
    }

    /// Returns what a place says, or has said before.
    async fn at(&self, place: &Place, request: ScoreRequest) -> Result<Scores, String> {
        let whom = match place {
            Place::Servers(_, whom) => whom.borrow().clone(),
            Place::Folder(folder) => self.whom(folder).await.map_err(|error| error.to_string())?,
        };
        let compute = async |request| self.compute(place, request).await;
        self.keeper.score(&whom, request, compute).await
    }

    async fn whom(&self, folder: &Path) -> anyhow::Result<Value> {
        if let Some(known) = self.folders.borrow().get(folder) {
            return Ok(known.clone());
        }
        let whom = self.keeper.answers.of_folder(folder, &self.dtype).await?;
        self.folders.borrow_mut().insert(folder.to_owned(), whom.clone());
        Ok(whom)
    }

    async fn compute(&self, place: &Place, request: ScoreRequest) -> Result<Scores, String> {
        match (place, &self.local) {
            (Place::Folder(folder), Some(local)) => local.score(folder.clone(), request).await,
            (Place::Folder(folder), None) => Err(format!("`{}` is not loaded", folder.display())),
            (Place::Servers(pool, _), _) => {
                let ScoreRequest { ids, start, top_k, chosen, .. } = request;
                let request = engine::ScoreRequest { ids, start, top_k, chosen };
                let score = async |engine: &Engine| engine.score(&request).await;
                let scores = match pool.call(score).await {
                    Ok(scores) => scores,
                    Err(error) => {
                        self.away.weigh(&error, self.ping(pool)).await;
                        return Err(self.end_if_gone(pool, error).await.to_string());
                    }
                };
                Ok(Scores {
                    log_probs: scores.log_probs,
                    top_ids: scores.top_ids,
                    top_log_probs: scores.top_log_probs,
                    chosen_log_probs: scores.chosen_log_probs,
                    version: scores.version,
                })
            }
        }
    }

    /// Ends the stage if nobody can be reached any more: to ask on would only
    /// blame every hint that is left.
    async fn end_if_gone(&self, pool: &Pool, error: engine::Error) -> engine::Error {
        let gone = !self.away.waits() && pool.is_gone();
        if gone && self.ping(pool).await.is_err() && pool.is_gone() {
            match self.absent.gone(error).await {}
        }
        error
    }

    /// Does a table as long as there is somebody to ask.
    pub(super) async fn unless_gone<T>(
        &self,
        table: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        self.absent.unless_needed(table).await
    }

    /// Waits from now on for servers that are away.
    pub(super) fn wait(&self, most: u32) {
        self.away.wait(most);
    }

    /// Does a shard of a followed folder, as long as the servers are there.
    pub(super) async fn attend(
        &self,
        shard: impl Future<Output = anyhow::Result<Tally>>,
    ) -> anyhow::Result<Result<Tally, String>> {
        let pings = async {
            for (pool, _) in self.pools() {
                self.ping(pool).await?;
            }
            Ok(())
        };
        if let Err(reason) = self.away.begin(pings).await {
            return Ok(Err(reason));
        }
        // Their weights may be others by now.
        for (pool, whom) in self.pools() {
            match self.away.weights(pool.weight_version().await) {
                Ok(weights) => whom.borrow_mut()["weights"] = weights,
                Err(reason) => return Ok(Err(reason)),
            }
        }
        self.meter().next_file();
        tokio::select! {
            tally = shard => {
                self.away.end();
                Ok(Ok(tally?))
            }
            reason = self.away.noticed() => Ok(Err(reason)),
        }
    }

    fn pools(&self) -> impl Iterator<Item = (&Pool, &RefCell<Value>)> {
        let fixed = if let Student::Fixed(place, _) = &self.student { Some(place) } else { None };
        std::iter::once(&self.teacher).chain(fixed).filter_map(|place| match place {
            Place::Servers(pool, whom) => Some((pool, whom)),
            Place::Folder(_) => None,
        })
    }

    async fn ping(&self, pool: &Pool) -> Result<(), engine::Error> {
        pool.call(async |engine: &Engine| engine.score(&self.probe).await.map(|_| ())).await
    }

    /// Refuses a policy with another tokenizer.
    fn check(&self, folder: &Path) -> Result<(), String> {
        let mut known = self.tokenizers.borrow_mut();
        let check = || same_tokenizer(folder, &self.tokenizer_hash);
        known.entry(folder.to_owned()).or_insert_with(check).clone()
    }
}
