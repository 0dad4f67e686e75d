//! Models in this process: one thread owns them and scores together what has
//! come in meanwhile.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use oclaw::model::{Dtype, Error, LoadOptions, Model, Score, Scored};
use oclaw::teacher_lp::{ScoreRequest, Scores};
use oclaw::train::read_record;
use tokio::sync::oneshot;

use super::DtypeName;
use super::scorer::folder_name;

/// So many requests are taken together; a model splits them by tokens.
const TOGETHER: usize = 64;
/// So many models are kept: a teacher, the policy of today and that of yesterday.
const MOST_MODELS: usize = 3;

type Answer = Result<Scores, String>;

/// A handle on the scoring thread, which ends when the handle is dropped.
pub(super) struct Local {
    jobs: mpsc::Sender<Job>,
}

enum Job {
    /// Load a model now, to know that it can be.
    Load(PathBuf, oneshot::Sender<Result<(), Error>>),
    Score(PathBuf, ScoreRequest, oneshot::Sender<Answer>),
}

impl Local {
    /// Starts the thread, which has no model yet.
    pub(super) fn start(dtype: DtypeName) -> anyhow::Result<Self> {
        let (jobs, waiting) = mpsc::channel();
        let dtype = match dtype {
            DtypeName::Auto => None,
            DtypeName::F32 => Some(Dtype::F32),
            DtypeName::Bf16 => Some(Dtype::Bf16),
        };
        let mut shelf = Shelf { dtype, models: Vec::new() };
        thread::Builder::new()
            .name("teacher".to_owned())
            .spawn(move || serve(&mut shelf, &waiting))?;
        Ok(Self { jobs })
    }

    /// Loads the model of a folder.
    pub(super) async fn load(&self, folder: &Path) -> anyhow::Result<()> {
        let (answer, outcome) = oneshot::channel();
        self.jobs.send(Job::Load(folder.to_owned(), answer)).map_err(|_| anyhow::anyhow!(GONE))?;
        Ok(outcome.await.map_err(|_| anyhow::anyhow!(GONE))??)
    }

    /// Scores one request by the model of a folder, together with whatever else
    /// is waiting.
    pub(super) async fn score(&self, folder: PathBuf, request: ScoreRequest) -> Answer {
        let (answer, scored) = oneshot::channel();
        self.jobs.send(Job::Score(folder, request, answer)).map_err(|_| GONE.to_owned())?;
        scored.await.map_err(|_| GONE.to_owned())?
    }
}

const GONE: &str = "the scoring thread has ended";

/// The models, the one used last at the end.
struct Shelf {
    dtype: Option<Dtype>,
    models: Vec<(PathBuf, Model)>,
}

impl Shelf {
    fn get(&mut self, folder: &Path) -> Result<&Model, Error> {
        let model = match self.models.iter().position(|(known, _)| known == folder) {
            Some(place) => self.models.remove(place).1,
            None => {
                let options = LoadOptions { dtype: self.dtype, ..LoadOptions::default() };
                // The oldest goes first, so that not one more is ever in memory.
                let excess = (self.models.len() + 1).saturating_sub(MOST_MODELS);
                self.models.drain(..excess);
                Model::load(folder, &options)?
            }
        };
        let last = self.models.len();
        self.models.push((folder.to_owned(), model));
        Ok(&self.models[last].1)
    }
}

fn serve(shelf: &mut Shelf, waiting: &mpsc::Receiver<Job>) {
    while let Ok(first) = waiting.recv() {
        let mut batches: Vec<Batch> = Vec::new();
        for job in std::iter::once(first).chain(waiting.try_iter()).take(TOGETHER) {
            match job {
                // Whoever no longer waits for an answer needs none.
                Job::Load(folder, answer) => drop(answer.send(shelf.get(&folder).map(|_| ()))),
                Job::Score(folder, request, answer) => {
                    match batches.iter_mut().find(|batch| batch.folder == folder) {
                        Some(batch) => batch.requests.push((request, answer)),
                        None => batches.push(Batch { folder, requests: vec![(request, answer)] }),
                    }
                }
            }
        }
        for batch in batches {
            batch.score(shelf);
        }
    }
}

/// What one model has to score.
struct Batch {
    folder: PathBuf,
    requests: Vec<(ScoreRequest, oneshot::Sender<Answer>)>,
}

impl Batch {
    fn score(self, shelf: &mut Shelf) {
        let model = match shelf.get(&self.folder) {
            Ok(model) => model,
            Err(error) => {
                for (_, answer) in self.requests {
                    drop(answer.send(Err(error.to_string())));
                }
                return;
            }
        };
        let mut answers = Vec::new();
        let mut scores = Vec::new();
        for (request, answer) in self.requests {
            match prepared(model, &request) {
                Ok(score) => {
                    answers.push(answer);
                    scores.push(score);
                }
                Err(error) => drop(answer.send(Err(error))),
            }
        }
        for (answer, scored) in answers.into_iter().zip(model.score(&scores)) {
            drop(answer.send(told(scored)));
        }
    }
}

fn prepared(model: &Model, request: &ScoreRequest) -> Result<Score, String> {
    let wide = |ids: &[i32]| -> Vec<i64> { ids.iter().map(|id| i64::from(*id)).collect() };
    let (ids, chosen) = (wide(&request.ids), wide(&request.chosen));
    for ids in [&ids, &chosen] {
        model.check_ids(ids.iter().copied()).map_err(|error| error.to_string())?;
    }
    let most = model.config.max_position_embeddings;
    if ids.len() as u64 > most as u64 {
        return Err(format!("{} tokens, the model takes {most}", ids.len()));
    }
    let ScoreRequest { start, temperature, top_k, .. } = *request;
    if top_k as u64 > model.config.vocab_size as u64 {
        return Err(format!("top {top_k} of {} ids", model.config.vocab_size));
    }
    Ok(Score { ids, start, temperature, top_k, chosen, entropy: false })
}

fn told(scored: Scored) -> Answer {
    let narrow = |id: i64| i32::try_from(id).map_err(|_| format!("{id} is no id of the schema"));
    Ok(Scores {
        log_probs: scored.log_probs,
        top_ids: scored.top_ids.into_iter().map(narrow).collect::<Result<_, _>>()?,
        top_log_probs: scored.top_log_probs,
        chosen_log_probs: scored.chosen_log_probs,
        version: None,
    })
}

/// A folder of policies, as `train` fills it.
pub(super) struct Policies {
    folder: PathBuf,
    /// The model that the line of policies started from, where nobody recorded it.
    base: Option<PathBuf>,
}

impl Policies {
    pub(super) fn new(folder: PathBuf, base: Option<PathBuf>) -> Self {
        Self { folder, base }
    }

    /// Returns the step and the folder of the policy that a weight version names.
    pub(super) fn of(&self, version: Option<&str>) -> Result<(String, PathBuf), String> {
        let step: u64 = match version {
            None => return Err("the turn has no weight version".to_owned()),
            // What servers call the weights they started with.
            Some("default") => 0,
            Some(name) => name.parse().map_err(|_| format!("`{name}` is no policy step"))?,
        };
        if step == 0 {
            let base = self.recorded().or_else(|| self.base.clone());
            let base = base.ok_or("no policy tells which model was step 0")?;
            return Ok(("0".to_owned(), base));
        }
        let folder = self.folder.join(format!("step-{step:06}"));
        match folder.is_dir() {
            true => Ok((step.to_string(), folder)),
            false => Err(format!("there is no `{}`", folder.display())),
        }
    }

    /// Returns the model that the policies say they started from.
    fn recorded(&self) -> Option<PathBuf> {
        let entries = std::fs::read_dir(&self.folder).ok()?;
        let policies = entries.flatten().map(|entry| entry.path());
        policies
            .filter(|path| folder_name(path).starts_with("step-"))
            .find_map(|path| Some(read_record(&path).ok()?.base.folder))
    }
}
