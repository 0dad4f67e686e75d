//! Where numbers are computed: a model in this process or servers, and who that is,
//! which may be another one by the next shard.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use oclaw::engine;
use oclaw::engine::{EngineOptions, Pool};
use oclaw::template::Chat;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::local::Local;
use super::whom::{SHARE, connect, same_tokenizer};
use crate::answers::Answers;
use crate::common::Context;
use crate::report::Failure;
use crate::servers;
use crate::visible::visible;

/// Where numbers are computed.
pub(super) enum Place {
    /// By the model of a folder, as it was named: often a link.
    Folder(PathBuf),
    /// By servers of one model, and who they are for the keeper.
    Servers(Box<Pool>, RefCell<Value>),
}

/// Servers, as the user named them.
pub(super) struct Named<'a> {
    pub(super) options: Vec<EngineOptions>,
    pub(super) typed: Vec<(&'a str, Option<&'a str>)>,
    /// Whether kept scores may do where nobody is there.
    pub(super) kept: bool,
}

impl Place {
    /// Connects to servers. Those that are not there are taken for whom they were when
    /// last asked, if kept scores may do; then the reason is returned as well.
    pub(super) async fn servers(
        named: Named<'_>,
        answers: &Answers,
        (topk, chat): (u16, &Chat),
        context: &Context,
    ) -> anyhow::Result<(Self, Option<engine::Error>)> {
        let Named { options, typed, kept } = named;
        let error = match connect(options.clone(), topk, chat, context).await {
            Ok(pool) => {
                let whom = answers.of_pool(&pool, typed.into_iter()).await?;
                return Ok((Self::Servers(Box::new(pool), RefCell::new(whom)), None));
            }
            Err(error) => error.downcast::<engine::Error>()?,
        };
        let known = (kept && error.is_transient()).then(|| answers.last_met(typed)).flatten();
        let Some(whom) = known else { return Err(error.into()) };
        let model = visible(whom["model"].as_str().unwrap_or_default());
        context.say(format!("{error}: only scores kept of `{model}`, met there before, are used"));
        let pool = Pool::unconnected(options, servers::teller(context));
        Ok((Self::Servers(Box::new(pool), RefCell::new(whom)), Some(error)))
    }
}

/// The model of a folder.
#[derive(Clone)]
pub(super) struct Known {
    /// Where the folder's name led.
    pub(super) real: PathBuf,
    /// Who it is for the keeper.
    pub(super) whom: Value,
    looks: Looks,
}

/// Where a folder's name leads, and how its files look. What looks alike is not read
/// again.
type Looks = (PathBuf, Vec<(OsString, [i64; 6])>);

/// The models of folders.
pub(super) struct Folders {
    dtype: String,
    tokenizer_hash: String,
    known: RefCell<HashMap<PathBuf, Known>>,
    /// Whether the tokenizer of a policy is ours, by its folder.
    tokenizers: RefCell<HashMap<PathBuf, Result<(), String>>>,
}

impl Folders {
    pub(super) fn new(dtype: String, tokenizer_hash: String) -> Self {
        Self { dtype, tokenizer_hash, known: RefCell::default(), tokenizers: RefCell::default() }
    }

    /// Returns the model of a folder, as it was when it was first asked for.
    pub(super) async fn get(&self, folder: &Path, answers: &Answers) -> anyhow::Result<Known> {
        if let Some(known) = self.known.borrow().get(folder) {
            return Ok(known.clone());
        }
        let looks = look(folder)?;
        let whom = answers.of_folder(&looks.0, &self.dtype).await?;
        let known = Known { real: looks.0.clone(), whom, looks };
        self.known.borrow_mut().insert(folder.to_owned(), known.clone());
        Ok(known)
    }

    /// Loads the model of a folder, anew if its name leads to another by now or its
    /// files are others.
    pub(super) async fn read(
        &self,
        folder: &Path,
        local: &Local,
        answers: &Answers,
    ) -> anyhow::Result<()> {
        let looks = look(folder)?;
        let known = self.known.borrow_mut().remove(folder);
        if let Some(known) = known {
            if known.looks == looks {
                self.known.borrow_mut().insert(folder.to_owned(), known);
                return Ok(());
            }
            // Under another name by now it would only take room.
            local.forget(&known.real)?;
        }
        same_tokenizer(&looks.0, &self.tokenizer_hash)
            .map_err(|what| Failure::failed(what).hint(SHARE))?;
        local.load(&looks.0).await?;
        self.get(folder, answers).await?;
        if look(folder)? != looks {
            // Neither who it is nor what it says is that of one model.
            local.forget(&looks.0)?;
            self.known.borrow_mut().remove(folder);
            anyhow::bail!("`{}` was written to while it was read", folder.display());
        }
        Ok(())
    }

    /// Returns where a folder's name led when its model was read.
    pub(super) fn real(&self, folder: &Path) -> PathBuf {
        let known = self.known.borrow().get(folder).map(|known| known.real.clone());
        known.unwrap_or_else(|| folder.to_owned())
    }

    /// Returns what a table may say of the model of a folder: where it is, and the hash
    /// of the hashes of its files, where they are known.
    pub(super) fn told(&self, folder: &Path) -> String {
        let real = self.real(folder).display().to_string();
        match self.known.borrow().get(folder).map(|known| &known.whom["files"]) {
            None | Some(Value::Null) => real,
            Some(files) => {
                let digest = Sha256::digest(files.to_string());
                let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("{real} {hash}")
            }
        }
    }

    /// Refuses a policy with another tokenizer.
    pub(super) fn check(&self, folder: &Path) -> Result<(), String> {
        let mut known = self.tokenizers.borrow_mut();
        let check = || same_tokenizer(folder, &self.tokenizer_hash);
        known.entry(folder.to_owned()).or_insert_with(check).clone()
    }
}

fn look(folder: &Path) -> anyhow::Result<Looks> {
    let looks = || -> io::Result<Looks> {
        let real = fs::canonicalize(folder)?;
        let mut files = Vec::new();
        for entry in fs::read_dir(&real)? {
            let entry = entry?;
            // Through links: a folder of a model hub holds nothing else.
            match fs::metadata(entry.path()) {
                Ok(facts) if facts.is_file() => files.push((entry.file_name(), appearance(&facts))),
                _ => {}
            }
        }
        files.sort();
        Ok((real, files))
    };
    looks().map_err(|error| anyhow::anyhow!("cannot read `{}`: {error}", folder.display()))
}

fn appearance(facts: &Metadata) -> [i64; 6] {
    let (length, inode) = (facts.len().cast_signed(), facts.ino().cast_signed());
    [length, inode, facts.mtime(), facts.mtime_nsec(), facts.ctime(), facts.ctime_nsec()]
}
