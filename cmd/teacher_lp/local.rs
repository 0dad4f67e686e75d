//! Models in this process: one thread owns them and scores together what has
//! come in meanwhile.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use oclaw::model::{Dtype, Error, LoadOptions, Model, Score, Scored};
use oclaw::teacher_lp::{ScoreRequest, Scores};
use oclaw::train::read_record;
use tokio::sync::oneshot;

use super::DtypeName;
use super::ahead::Ahead;
use super::whom::folder_name;

/// So many requests are taken together; a model splits them by tokens.
const TOGETHER: usize = 64;
/// The requests of one turn, which begin alike, come one after another: so long
/// without another and the turn's are all there.
const LULL: Duration = Duration::from_millis(2);
/// So many models are kept: a teacher, the policy of today and that of yesterday.
const MOST_MODELS: usize = 3;

type Answer = Result<Scores, String>;

/// A handle on the scoring thread, which ends when the handle is dropped.
pub(super) struct Local {
    jobs: mpsc::Sender<Job>,
    work: Arc<Work>,
}

/// Tokens of sequences that were scored, and those that were computed for it.
#[derive(Debug, Default)]
struct Work {
    scored: AtomicU64,
    computed: AtomicU64,
}

enum Job {
    /// Load a model now, to know that it can be.
    Load(PathBuf, oneshot::Sender<Result<(), Error>>),
    /// Let go of a model, whose files are others by now.
    Forget(PathBuf),
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
        let work = Arc::<Work>::default();
        let mut shelf =
            Shelf { dtype, models: Vec::new(), ahead: Ahead::default(), work: work.clone() };
        thread::Builder::new()
            .name("teacher".to_owned())
            .spawn(move || serve(&mut shelf, &waiting))?;
        Ok(Self { jobs, work })
    }

    /// Returns how many tokens were scored, and how many had to be computed: what
    /// several sequences begin with is computed once.
    pub(super) fn work(&self) -> (u64, u64) {
        let Work { scored, computed } = &*self.work;
        (scored.load(Ordering::Relaxed), computed.load(Ordering::Relaxed))
    }

    /// Loads the model of a folder.
    pub(super) async fn load(&self, folder: &Path) -> anyhow::Result<()> {
        let (answer, outcome) = oneshot::channel();
        self.jobs.send(Job::Load(folder.to_owned(), answer)).map_err(|_| anyhow::anyhow!(GONE))?;
        Ok(outcome.await.map_err(|_| anyhow::anyhow!(GONE))??)
    }

    /// Lets go of the model of a folder.
    pub(super) fn forget(&self, folder: &Path) -> anyhow::Result<()> {
        self.jobs.send(Job::Forget(folder.to_owned())).map_err(|_| anyhow::anyhow!(GONE))
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
    ahead: Ahead,
    work: Arc<Work>,
}

impl Shelf {
    fn get(&mut self, folder: &Path) -> Result<(&Model, &mut Ahead), Error> {
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
        Ok((&self.models[last].1, &mut self.ahead))
    }
}

fn serve(shelf: &mut Shelf, waiting: &mpsc::Receiver<Job>) {
    while let Ok(first) = waiting.recv() {
        let mut batches: Vec<Batch> = Vec::new();
        let more = std::iter::from_fn(|| waiting.recv_timeout(LULL).ok());
        for job in std::iter::once(first).chain(more).take(TOGETHER) {
            match job {
                // Whoever no longer waits for an answer needs none.
                Job::Load(folder, answer) => drop(answer.send(shelf.get(&folder).map(|_| ()))),
                Job::Forget(folder) => {
                    shelf.models.retain(|(known, _)| *known != folder);
                    shelf.ahead = Ahead::default();
                }
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
        let work = shelf.work.clone();
        let (model, ahead) = match shelf.get(&self.folder) {
            Ok(found) => found,
            Err(error) => {
                for (_, answer) in self.requests {
                    drop(answer.send(Err(error.to_string())));
                }
                return;
            }
        };
        let mut asked = Vec::new();
        let mut coming = Vec::new();
        for (request, answer) in self.requests {
            // What the teacher cannot take is told when it is asked.
            let fit = request
                .ahead
                .iter()
                .filter_map(|(ids, start)| Some((sequence(model, ids).ok()?, *start)));
            coming.extend(fit);
            work.scored.fetch_add(request.ids.len() as u64, Ordering::Relaxed);
            match prepared(model, &request) {
                Ok(score) => match ahead.take(&self.folder, &score) {
                    Some(states) => drop(answer.send(told(model.read(&states, &score)))),
                    None => asked.push((score, Some(answer))),
                },
                Err(error) => drop(answer.send(Err(error))),
            }
        }
        let of_asked = asked.iter().map(|(score, _)| (score.ids.clone(), score.start));
        let sequences: Vec<_> = of_asked.chain(coming).collect();
        let slices: Vec<_> = sequences.iter().map(|(ids, start)| (&ids[..], *start)).collect();
        let computed = model.each_states(&slices, |place, states| match asked.get_mut(place) {
            Some((score, answer)) => {
                let scored = model.read(&states, score);
                // Each place comes once.
                if let Some(answer) = answer.take() {
                    drop(answer.send(told(scored)));
                }
            }
            None => {
                let (ids, start) = &sequences[place];
                ahead.keep(&self.folder, (ids, *start), states.copy());
            }
        });
        work.computed.fetch_add(computed as u64, Ordering::Relaxed);
    }
}

/// Returns ids that the model can take.
fn sequence(model: &Model, ids: &[i32]) -> Result<Vec<i64>, String> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    model.check_ids(ids.iter().copied()).map_err(|error| error.to_string())?;
    let most = model.config.max_position_embeddings;
    match ids.len() as u64 > most as u64 {
        true => Err(format!("{} tokens, the model takes {most}", ids.len())),
        false => Ok(ids),
    }
}

fn prepared(model: &Model, request: &ScoreRequest) -> Result<Score, String> {
    let ids = sequence(model, &request.ids)?;
    let chosen: Vec<i64> = request.chosen.iter().map(|id| i64::from(*id)).collect();
    model.check_ids(chosen.iter().copied()).map_err(|error| error.to_string())?;
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
