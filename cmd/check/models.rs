//! Model folders: whole, of a family that is computed here, and with tokenizers
//! that agree.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use oclaw::template::{Chat, Tokenizer};
use oclaw::tensors::Reader;
use serde_json::Value;

use super::finding::Finding;
use super::setup::Setup;
use crate::report::{Failure, Kind};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Weights from which on a policy keeps the type of its base.
const LARGE: u64 = 1_000_000_000;

/// Looks at every model that a process of ours is to load. Returns the bytes of a
/// policy and of its optimiser's state, if there is a model to train.
pub(super) fn models(setup: &Setup, findings: &mut Vec<Finding>) -> Option<(u64, u64)> {
    let mut users: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (name, folder) in setup.with("model") {
        users.entry(folder).or_default().insert(name);
    }
    if setup.value("teacher-lp", "engine").is_some()
        && let Some(folder) = setup.value("teacher-lp", "tokenizer")
    {
        findings.push(match Chat::load(Path::new(&folder)) {
            Ok(_) => Finding::ok("model", &folder, "tokenizer and chat template for teacher-lp"),
            Err(error) => Finding::error("model", &folder, error),
        });
    }
    let mut trained = None;
    for (folder, users) in users {
        let users: Vec<&str> = users.into_iter().collect();
        match model(Path::new(&folder)) {
            Ok((weights, bytes)) => {
                if users.contains(&"train") {
                    let policy = if weights < LARGE { weights * 4 } else { bytes };
                    trained = Some((policy, weights * 8));
                }
                let millions = weights as f64 / 1e6;
                let found = format!("{millions:.1} M weights, whole, for {}", users.join(", "));
                findings.push(Finding::ok("model", folder, found));
            }
            Err(error) => {
                let there = Path::new(&folder).join("config.json").is_file();
                let finding = Finding::error("model", &folder, error).because(Kind::Failed);
                findings.push(match there {
                    true => finding,
                    false => finding
                        .because(Kind::Usage)
                        .remedy("name a Hugging Face folder; `scripts/fetch-model.sh` makes one"),
                });
            }
        }
    }
    trained
}

/// Looks at one folder. Returns how many weights it has, and their bytes.
fn model(folder: &Path) -> anyhow::Result<(u64, u64)> {
    if !folder.join("config.json").is_file() {
        return Err(Failure::usage("there is no model: no `config.json`").into());
    }
    family(folder)?;
    Chat::load(folder)?;
    let (mut weights, mut bytes) = (0, 0);
    let mut held = BTreeSet::new();
    let announced = announced(folder)?;
    for file in announced.values().collect::<BTreeSet<_>>() {
        let path = folder.join(file);
        let reader = Reader::open(&path)?;
        for entry in reader.entries() {
            weights += entry.shape.iter().map(|size| *size as u64).product::<u64>();
            held.insert((file.clone(), entry.name.clone()));
        }
        bytes += std::fs::metadata(&path)?.len();
    }
    let absent = announced.iter().find(|(tensor, file)| {
        !tensor.is_empty() && !held.contains(&((*file).clone(), (*tensor).clone()))
    });
    match absent {
        Some((tensor, file)) => Err(anyhow!("`{file}` lacks the tensor `{tensor}`")),
        None => Ok((weights, bytes)),
    }
}

/// Returns the file of each tensor; "" stands for all tensors of a single file.
fn announced(folder: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    if folder.join(SINGLE).exists() || !folder.join(INDEX).exists() {
        return Ok(BTreeMap::from([(String::new(), SINGLE.to_owned())]));
    }
    let path = folder.join(INDEX);
    let place = || format!("cannot read `{}`", path.display());
    let index: Value = serde_json::from_slice(&std::fs::read(&path).with_context(place)?)?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| anyhow!("`{}` has no `weight_map`", path.display()))?;
    let file =
        |(tensor, file): (&String, &Value)| Some((tensor.clone(), file.as_str()?.to_owned()));
    Ok(map.iter().filter_map(file).collect())
}

#[cfg(feature = "torch")]
fn family(folder: &Path) -> anyhow::Result<()> {
    oclaw::model::Config::read(folder)?;
    Ok(())
}

/// Says what this build lacks.
#[cfg(not(feature = "torch"))]
fn family(_: &Path) -> anyhow::Result<()> {
    Err(crate::common::needs_torch("a model"))
}

/// Compares the tokenizers of whoever shares ids with the policy.
pub(super) fn tokenizers(setup: &Setup, told: &[(String, PathBuf)], findings: &mut Vec<Finding>) {
    let mut holders: Vec<(String, PathBuf)> = Vec::new();
    let mut hold = |who: &str, folder: Option<String>| {
        holders.extend(folder.map(|folder| (who.to_owned(), PathBuf::from(folder))));
    };
    hold("the policy's engine", setup.policy());
    hold("train", setup.value("train", "model"));
    let teacher = setup.value("teacher-lp", "tokenizer");
    hold("teacher-lp", teacher.or_else(|| setup.value("teacher-lp", "model")));
    holders.extend(told.iter().cloned());
    let known: Vec<(String, PathBuf, String)> = holders
        .into_iter()
        .filter_map(|(who, folder)| Some((who, Tokenizer::hash_of(&folder).ok()?, folder)))
        .map(|(who, hash, folder)| (who, folder, hash))
        .collect();
    let Some(((first, base, hash), others)) = known.split_first() else { return };
    let differs: Vec<_> = others.iter().filter(|(_, _, other)| other != hash).collect();
    for (who, folder, _) in &differs {
        let found = format!("`{}` is not that of {first}, `{}`", folder.display(), base.display());
        let remedy = "ids mean other words there: take models of one family, or the same folder";
        findings.push(Finding::fail("tokenizer", who, found).remedy(remedy));
    }
    if differs.is_empty() && !others.is_empty() {
        let mut names: Vec<&str> = known.iter().map(|(who, ..)| who.as_str()).collect();
        names.dedup();
        findings.push(Finding::ok("tokenizer", names.join(", "), "the same"));
    }
}
