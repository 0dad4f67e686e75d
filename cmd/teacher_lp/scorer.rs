//! Who computes the numbers: the teacher, and the student where the likeliest
//! tokens are wanted, each a model in this process or a server.

use std::cell::RefCell;

use comfy_table::Table;
use oclaw::engine;
use oclaw::engine::{Engine, EngineOptions, Pool};
use oclaw::stage::Tally;
use oclaw::teacher_lp::{Asked, ScoreRequest, Scores};
use oclaw::template::Chat;
use oclaw::trajectory::Turn;
use serde_json::Value;

use super::Args;
use super::keeper::Keeper;
use super::local::{Local, Policies};
use super::places::{Folders, Named, Place};
use super::whom::{dtype, folder_name, probe, student_folder, version_of};
use crate::asking::absent::{Absent, is_lost};
use crate::away::Away;
use crate::common::Context;
use crate::embedded;
use crate::servers;
use crate::spending::{Meter, Share, Tokens};

/// Teacher and student.
pub(super) struct Scorer {
    teacher: Place,
    student: Student,
    local: Option<Local>,
    keeper: Keeper,
    folders: Folders,
    /// What servers are tried with.
    probe: engine::ScoreRequest,
    away: Away,
    absent: Absent,
}

enum Student {
    /// Nobody asks for it.
    None,
    /// The policy that sampled the turn.
    Policies(Policies),
    /// The same for all turns.
    Fixed(Place),
}

impl Scorer {
    /// Loads or connects to all who will be asked, and tries the servers. Where they are
    /// not there, `kept` scores may do.
    pub(super) async fn new(
        (args, kept): (&Args, bool),
        chat: &Chat,
        keeper: Keeper,
        context: &Context,
    ) -> anyhow::Result<Self> {
        let student_folder = student_folder(args)?;
        let needs_local = args.model.is_some() || student_folder.is_some() || args.policy.is_some();
        let local = needs_local.then(|| Local::start(args.dtype)).transpose()?;
        let ask = (args.topk(), chat);
        let (teacher, no_teacher) = match (args.servers.any(), &args.model) {
            (true, _) => {
                let options = args.servers.options(context, |url| args.options(url.as_str()))?;
                let named = Named { options, typed: args.servers.typed().collect(), kept };
                Place::servers(named, &keeper.answers, ask, context).await?
            }
            (false, folder) => (Place::Folder(folder.clone().unwrap_or_default()), None),
        };
        let (student, no_student) = match (&args.student, student_folder) {
            _ if args.topk() == 0 => (Student::None, None),
            (_, Some(folder)) => (Student::Fixed(Place::Folder(folder)), None),
            (Some(url), None) => {
                let url = url.to_string_lossy();
                let options = vec![student_options(args, &url)?];
                let typed = vec![(&*url, args.student_model.as_deref())];
                let named = Named { options, typed, kept };
                let (place, error) = Place::servers(named, &keeper.answers, ask, context).await?;
                (Student::Fixed(place), error)
            }
            (None, None) => {
                let policies = args.policy.clone().unwrap_or_default();
                (Student::Policies(Policies::new(policies, args.model.clone())), None)
            }
        };
        let scorer = Self {
            teacher,
            student,
            local,
            keeper,
            folders: Folders::new(dtype(args), chat.tokenizer.hash()),
            probe: probe(args.topk(), chat)?,
            away: Away::default(),
            absent: no_teacher.or(no_student).map_or_else(Absent::default, Absent::new),
        };
        scorer.read_folders().await?;
        Ok(scorer)
    }

    /// Loads the models of folders, and those anew that are others by now.
    async fn read_folders(&self) -> anyhow::Result<()> {
        for place in self.places() {
            if let (Place::Folder(folder), Some(local)) = (place, &self.local) {
                self.folders.read(folder, local, &self.keeper.answers).await?;
            }
        }
        Ok(())
    }

    fn places(&self) -> impl Iterator<Item = &Place> {
        let fixed = if let Student::Fixed(place) = &self.student { Some(place) } else { None };
        std::iter::once(&self.teacher).chain(fixed)
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
    pub(super) fn name(&self) -> String {
        match &self.teacher {
            Place::Folder(folder) => folder_name(&self.folders.real(folder)),
            Place::Servers(_, whom) => model_of(whom),
        }
    }

    /// Returns what a table may say of the models in this process that it is scored
    /// with.
    pub(super) fn told(&self) -> Vec<String> {
        let folders = self.places().filter_map(|place| match place {
            Place::Folder(folder) => Some(self.folders.told(folder)),
            Place::Servers(..) => None,
        });
        let mut told: Vec<_> = folders.collect();
        told.dedup();
        told
    }

    /// Begins a turn, whose student goes before its hints.
    pub(super) fn share(&self, turn: &Turn) -> Share<'_> {
        self.meter().share(turn.hints.as_ref().map_or(0, Vec::len))
    }

    /// Returns whether everybody can divide logits by a temperature.
    pub(super) fn tempers(&self) -> bool {
        self.pools().next().is_none()
    }

    /// Scores one request by whom it asks.
    pub(super) async fn score(
        &self,
        mut request: ScoreRequest,
        share: &Share<'_>,
    ) -> Result<Scores, String> {
        let version = match &request.asked {
            Asked::Teacher => return self.at(&self.teacher, request, share).await,
            Asked::Student(version) => version.clone(),
        };
        match &self.student {
            Student::None => Err("there is none".to_owned()),
            Student::Fixed(place) => {
                let name = match place {
                    Place::Folder(folder) => version_of(&self.folders.real(folder)),
                    Place::Servers(_, whom) => model_of(whom),
                };
                let place = self.one_with_teacher(place, &mut request);
                let mut scores = self.at(place, request, share).await?;
                scores.version.get_or_insert(name);
                Ok(scores)
            }
            Student::Policies(policies) => {
                let (step, folder) = policies.of(version.as_deref())?;
                self.folders.check(&folder)?;
                let place = Place::Folder(folder);
                let place = self.one_with_teacher(&place, &mut request);
                let mut scores = self.at(place, request, share).await?;
                scores.version = Some(step);
                Ok(scores)
            }
        }
    }

    /// Returns the teacher's place if the student's is the same model. Another
    /// student cannot compute along what the teacher will be asked.
    fn one_with_teacher<'a>(&'a self, place: &'a Place, request: &mut ScoreRequest) -> &'a Place {
        let real = |place: &Place| match place {
            Place::Folder(folder) => std::fs::canonicalize(self.folders.real(folder)).ok(),
            Place::Servers(..) => None,
        };
        if real(place).is_some_and(|folder| real(&self.teacher) == Some(folder)) {
            return &self.teacher;
        }
        request.ahead.clear();
        place
    }

    /// Returns what a place says, or has said before.
    async fn at(
        &self,
        place: &Place,
        request: ScoreRequest,
        share: &Share<'_>,
    ) -> Result<Scores, String> {
        let whom = match place {
            Place::Servers(_, whom) => whom.borrow().clone(),
            Place::Folder(folder) => {
                let known = self.folders.get(folder, &self.keeper.answers).await;
                known.map_err(|error| error.to_string())?.whom
            }
        };
        let compute = async |request| self.compute(place, request).await;
        self.keeper.score((&whom, share), request, compute).await
    }

    async fn compute(&self, place: &Place, request: ScoreRequest) -> Result<Scores, String> {
        match (place, &self.local) {
            (Place::Folder(folder), Some(local)) => {
                local.score(self.folders.real(folder), request).await
            }
            (Place::Folder(folder), None) => Err(format!("`{}` is not loaded", folder.display())),
            (Place::Servers(pool, _), _) => {
                // Nobody was ever there: the stage ends here.
                if pool.reached().is_empty() {
                    self.absent.hold().await;
                }
                let ScoreRequest { ids, start, top_k, chosen, .. } = request;
                let request = engine::ScoreRequest { ids, start, top_k, chosen };
                let score = async |engine: &Engine| engine.score(&request).await;
                let scores = match pool.call(score).await {
                    Ok(scores) => scores,
                    Err(error) => {
                        // What answered has computed, whatever becomes of it.
                        if error.is_answer() {
                            let tokens = Tokens::known(request.ids.len() as u64, 0);
                            self.meter().tokens(tokens);
                        }
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

    /// Ends the stage if asking on would only blame every hint that is left.
    async fn end_if_gone(&self, pool: &Pool, error: engine::Error) -> engine::Error {
        match !self.away.waits() && is_lost(pool, &error, async || self.ping(pool).await).await {
            true => match self.absent.gone(error).await {},
            false => error,
        }
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
        // The models in this process, too.
        if let Err(error) = self.read_folders().await {
            return Ok(Err(error.to_string()));
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
        self.places().filter_map(|place| match place {
            Place::Servers(pool, whom) => Some((&**pool, whom)),
            Place::Folder(_) => None,
        })
    }

    async fn ping(&self, pool: &Pool) -> Result<(), engine::Error> {
        pool.call(async |engine: &Engine| engine.score(&self.probe).await.map(|_| ())).await
    }
}

fn model_of(whom: &RefCell<Value>) -> String {
    whom.borrow()["model"].as_str().unwrap_or_default().to_owned()
}

/// Returns how to reach the student's server.
fn student_options(args: &Args, url: &str) -> anyhow::Result<EngineOptions> {
    let key = args.student_key_file.as_deref().map(|file| embedded::key("", Some(file)));
    Ok(EngineOptions {
        key: key.transpose()?.flatten(),
        model: args.student_model.clone(),
        ..args.options(url)
    })
}
