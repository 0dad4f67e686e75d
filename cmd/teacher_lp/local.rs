//! The teacher in this process: one thread owns the model and scores together
//! what has come in meanwhile.

use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

use oclaw::model::{Dtype, LoadOptions, Model, Score};
use oclaw::teacher_lp::ScoreRequest;
use tokio::sync::oneshot;

use super::DtypeName;

/// So many requests are taken together; the model splits them by tokens.
const TOGETHER: usize = 64;

type Answer = Result<Vec<f32>, String>;

/// A handle on the scoring thread, which ends when the handle is dropped.
pub(super) struct Local {
    name: String,
    jobs: mpsc::Sender<Job>,
}

struct Job {
    request: ScoreRequest,
    answer: oneshot::Sender<Answer>,
}

impl Local {
    /// Loads the model on its thread.
    pub(super) fn start(folder: PathBuf, dtype: DtypeName) -> anyhow::Result<Self> {
        let real = std::fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
        let name = real.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (jobs, waiting) = mpsc::channel();
        let (loaded, outcome) = mpsc::channel();
        thread::Builder::new().name("teacher".to_owned()).spawn(move || {
            let dtype = match dtype {
                DtypeName::Auto => None,
                DtypeName::F32 => Some(Dtype::F32),
                DtypeName::Bf16 => Some(Dtype::Bf16),
            };
            match Model::load(&folder, &LoadOptions { dtype, ..LoadOptions::default() }) {
                Ok(model) => {
                    let _ = loaded.send(Ok(()));
                    serve(&model, &waiting);
                }
                Err(error) => {
                    let _ = loaded.send(Err(error));
                }
            }
        })?;
        outcome.recv()??;
        Ok(Self { name, jobs })
    }

    /// Returns the folder's own name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Scores one request, together with whatever else is waiting.
    pub(super) async fn score(&self, request: ScoreRequest) -> Answer {
        let (answer, scored) = oneshot::channel();
        let gone = |_| "the scoring thread has ended".to_owned();
        self.jobs.send(Job { request, answer }).map_err(|error| gone(error.to_string()))?;
        scored.await.map_err(|error| gone(error.to_string()))?
    }
}

fn serve(model: &Model, waiting: &mpsc::Receiver<Job>) {
    while let Ok(first) = waiting.recv() {
        let jobs = std::iter::once(first).chain(waiting.try_iter()).take(TOGETHER);
        let mut answers = Vec::new();
        let mut scores = Vec::new();
        for Job { request, answer } in jobs {
            match prepared(model, &request) {
                Ok(score) => {
                    answers.push(answer);
                    scores.push(score);
                }
                // Whoever no longer waits for an answer needs none.
                Err(error) => drop(answer.send(Err(error))),
            }
        }
        for (answer, scored) in answers.into_iter().zip(model.score(&scores)) {
            drop(answer.send(Ok(scored.log_probs)));
        }
    }
}

fn prepared(model: &Model, request: &ScoreRequest) -> Result<Score, String> {
    let ids: Vec<i64> = request.ids.iter().map(|id| i64::from(*id)).collect();
    model.check_ids(ids.iter().copied()).map_err(|error| error.to_string())?;
    let most = model.config.max_position_embeddings;
    if ids.len() as u64 > most as u64 {
        return Err(format!("{} tokens, the model takes {most}", ids.len()));
    }
    Ok(Score { ids, start: request.start, temperature: request.temperature, ..Score::default() })
}
