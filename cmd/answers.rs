//! Answers already paid for: the flags, where the file is, and what a stage does
//! with it. A cache that cannot be used is a warning, never a reason to stop.

use std::cell::RefCell;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use oclaw::cache::{Cache, Error, Key, Question};
use oclaw::engine;
use oclaw::engine::Pool;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::files;

/// Files below this size are quicker hashed than looked up.
const SMALL: u64 = 1 << 20;

/// Where answers are kept.
#[derive(clap::Args, Debug)]
pub(crate) struct Keeping {
    /// File of answers already paid for [default: oclaw/answers.sqlite in the user's cache folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) cache: Option<PathBuf>,
    /// Neither look answers up nor keep them; outranks --cache
    #[arg(long)]
    no_cache: bool,
}

impl Keeping {
    /// Returns the file to use, if any.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        match (self.no_cache, &self.cache) {
            (true, _) => None,
            (false, Some(path)) => Some(path.clone()),
            (false, None) => default_path(),
        }
    }

    /// Refuses a file that was named by mistake; touches nothing.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match (self.no_cache, &self.cache) {
            (false, Some(path)) => Cache::check(path),
            _ => Ok(()),
        }
    }
}

/// Returns `$XDG_CACHE_HOME/oclaw/answers.sqlite`, else the same in `~/.cache`.
pub(crate) fn default_path() -> Option<PathBuf> {
    let folder = |name: &str| {
        let folder = PathBuf::from(std::env::var_os(name)?);
        folder.is_absolute().then_some(folder)
    };
    let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(caches.join("oclaw/answers.sqlite"))
}

/// The answers of one kind of question.
pub(crate) struct Answers {
    kind: String,
    file: RefCell<AnswerFile>,
    /// Whether nothing shall be kept.
    looks_only: bool,
}

/// The file, which is opened, and made, when it is first needed: a run that fails
/// before that leaves none.
enum AnswerFile {
    None,
    Named(PathBuf),
    Open(Box<Cache>),
}

impl Answers {
    /// Takes the file that answers are kept in. One that was named and is somebody
    /// else's is an error.
    pub(crate) fn open(keeping: &Keeping, kind: &str) -> Result<Self, Error> {
        keeping.check()?;
        let file = keeping.path().map_or(AnswerFile::None, AnswerFile::Named);
        Ok(Self { kind: kind.to_owned(), file: RefCell::new(file), looks_only: false })
    }

    /// Opens the file to look only: nothing is made, renamed or kept.
    pub(crate) fn peek(keeping: &Keeping, kind: &str) -> Result<Self, Error> {
        keeping.check()?;
        let there = keeping.path().filter(|path| path.is_file());
        let cache = there.and_then(|path| Cache::open(&path).ok());
        let file = cache.map_or(AnswerFile::None, |cache| AnswerFile::Open(Box::new(cache)));
        Ok(Self { kind: kind.to_owned(), file: RefCell::new(file), looks_only: true })
    }

    /// Does something with the file, if there is one. A damaged one is set aside.
    fn with<T>(&self, act: impl FnOnce(&Cache) -> T) -> Option<T> {
        let mut file = self.file.borrow_mut();
        if let AnswerFile::Named(path) = &*file {
            *file = match Cache::open_or_renew(path) {
                Ok(opened) => {
                    if let Some((aside, damage)) = opened.set_aside {
                        let aside = aside.display().to_string();
                        tracing::warn!(%damage, aside, "set the answers aside and started anew");
                    }
                    AnswerFile::Open(Box::new(opened.cache))
                }
                Err(error) => {
                    tracing::warn!(%error, "going on without kept answers");
                    AnswerFile::None
                }
            };
        }
        match &*file {
            AnswerFile::Open(cache) => Some(act(cache)),
            AnswerFile::Named(_) | AnswerFile::None => None,
        }
    }

    /// Tells whether there is a file to look answers up in.
    pub(crate) fn any(&self) -> bool {
        self.with(|_| ()).is_some()
    }

    /// Returns the question that a request to somebody is.
    pub(crate) fn question(&self, whom: &Value, request: &Value) -> Question {
        Question::new(&self.kind, whom, request)
    }

    /// Returns a kept answer.
    pub(crate) fn find<T: DeserializeOwned>(&self, key: &Key) -> Option<T> {
        match self.with(|cache| cache.get(key))? {
            // What cannot be read any more is asked again and replaced.
            Ok(text) => serde_json::from_str(&text?).ok(),
            Err(error) => {
                self.give_up(&error);
                None
            }
        }
    }

    /// Returns the kept answers to several questions.
    pub(crate) fn find_all<T: DeserializeOwned>(&self, keys: &[Key]) -> Vec<Option<T>> {
        let read = |text: Option<String>| serde_json::from_str(&text?).ok();
        match self.with(|cache| cache.get_all(keys)) {
            Some(Ok(texts)) => texts.into_iter().map(read).collect(),
            Some(Err(error)) => {
                self.give_up(&error);
                keys.iter().map(|_| None).collect()
            }
            None => keys.iter().map(|_| None).collect(),
        }
    }

    /// Keeps an answer. Returns when it would outlive this process.
    pub(crate) async fn keep<T: Serialize>(&self, key: Key, answer: &T) {
        self.keep_as(&self.kind, key, answer).await;
    }

    async fn keep_as<T: Serialize>(&self, kind: &str, key: Key, answer: &T) {
        let Ok(text) = serde_json::to_string(answer) else { return };
        let (sender, stored) = oneshot::channel();
        if self.looks_only {
            return;
        }
        // Nobody waits any more if the run has ended.
        let then = |outcome| drop(sender.send(outcome));
        if self.with(|cache| cache.put(key, kind, text, then)).is_none() {
            return;
        }
        if let Ok(Err(error)) = stored.await {
            self.give_up(&error);
        }
    }

    /// Goes on without the file, which is set aside if it is damaged.
    fn give_up(&self, error: &Error) {
        let AnswerFile::Open(cache) = self.file.replace(AnswerFile::None) else { return };
        tracing::warn!(%error, "going on without kept answers");
        if matches!(error, Error::Damaged { .. }) && !self.looks_only {
            match cache.set_aside() {
                Ok(aside) => tracing::warn!(aside = %aside.display(), "set the answers aside"),
                Err(error) => tracing::warn!(%error, "cannot set the answers aside"),
            }
        }
    }

    /// Says who servers of one model are: the model and, where they tell it, the
    /// version of its weights. Their addresses and kinds are no part of it: whoever of
    /// them answers, it is asked the same of the same model, and who was there must
    /// make no difference to what is found. `typed` is how the user named them, for a
    /// dry run to recognise them. Where only one that is away tells the version, it is
    /// the one that it told last. It is an error if their weights differ.
    pub(crate) async fn of_pool<'t>(
        &self,
        pool: &Pool,
        typed: impl Iterator<Item = (&'t str, Option<&'t str>)>,
    ) -> Result<Value, engine::Error> {
        let weights = match pool.weight_version().await {
            Err(error @ engine::Error::Unlike { .. }) => return Err(error),
            Err(error) => {
                // What does not tell a version has none.
                if error.is_transient() {
                    tracing::warn!(%error, "answers kept under a version of the weights are not found");
                }
                None
            }
            Ok(weights) => weights,
        };
        let reached = pool.reached();
        let (there, away): (Vec<_>, Vec<_>) = typed.partition(|(url, _)| reached.contains(url));
        let weights = weights.or_else(|| {
            let weights = away.into_iter().find_map(|typed| self.told_by(typed, pool))?;
            pool.expect_weights(&weights);
            Some(weights)
        });
        let whom = json!({"model": pool.model(), "weights": weights});
        // Who was not met may be anybody.
        for typed in there {
            self.keep_as("engine", met(typed).vote(0), &whom).await;
        }
        Ok(whom)
    }

    /// Returns the version of the weights that a server of this model told when it
    /// was last asked.
    fn told_by(&self, typed: (&str, Option<&str>), pool: &Pool) -> Option<String> {
        let whom: Value = self.find(&met(typed).vote(0))?;
        let same = whom["model"].as_str() == pool.model().as_deref();
        whom["weights"].as_str().filter(|_| same).map(str::to_owned)
    }

    /// Says who the first of these servers that is known was when last asked. Does
    /// not make the file.
    pub(crate) fn last_met<'t>(
        &self,
        typed: impl IntoIterator<Item = (&'t str, Option<&'t str>)>,
    ) -> Option<Value> {
        if let AnswerFile::Named(path) = &*self.file.borrow()
            && !path.is_file()
        {
            return None;
        }
        typed.into_iter().find_map(|typed| self.find(&met(typed).vote(0)))
    }

    /// Says who a model in this process is: the hashes of its files, and the
    /// version of the program that computes with them.
    pub(crate) async fn of_folder(&self, folder: &Path, dtype: &str) -> anyhow::Result<Value> {
        if !self.any() {
            return Ok(Value::Null);
        }
        let mut hashes = serde_json::Map::new();
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            names.push(entry?.file_name());
        }
        names.sort();
        for name in names {
            let (path, name) = (folder.join(&name), name.to_string_lossy().into_owned());
            if path.is_file() && !name.starts_with('.') {
                hashes.insert(name, self.hash(&path).await?.into());
            }
        }
        let version = env!("CARGO_PKG_VERSION");
        Ok(json!({"files": hashes, "dtype": dtype, "oclaw": version}))
    }

    /// Hashes a file, unless it was hashed before and has not changed since.
    async fn hash(&self, path: &Path) -> anyhow::Result<String> {
        let facts = std::fs::metadata(path)?;
        if facts.len() < SMALL {
            return files::hash(path);
        }
        let state = json!({
            "path": std::fs::canonicalize(path)?.to_string_lossy(),
            "length": facts.len(),
            "device": facts.dev(),
            "inode": facts.ino(),
            "changed": [facts.mtime(), facts.mtime_nsec(), facts.ctime(), facts.ctime_nsec()],
        });
        let key = Question::new("file", &Value::Null, &state).vote(0);
        if let Some(hash) = self.find(&key) {
            return Ok(hash);
        }
        let hash = files::hash(path)?;
        self.keep_as("file", key, &hash).await;
        Ok(hash)
    }
}

fn met((url, model): (&str, Option<&str>)) -> Question {
    Question::new("engine", &Value::Null, &json!({"url": url, "model": model}))
}
