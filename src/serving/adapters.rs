//! Adapters (LoRA) that lie ready beside the model, each under a name of its own.
//!
//! Each is the model with two small matrices beside some weights; the weights are
//! there once. One that is let go of stays until the last answer that uses it has
//! ended.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokio::sync::oneshot;

use crate::model::{Adapter, Model};

use super::failure::Failure;

/// Names that are remembered after their adapter was let go of.
const MOST_GONE: usize = 4096;

/// An adapter's number: a name may come again, a number does not.
pub(super) type AdapterId = u64;

/// An adapter to be loaded.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) reply: oneshot::Sender<Result<(), String>>,
}

/// An adapter to let go of.
#[derive(Debug)]
pub(super) struct Unload {
    pub(super) name: String,
    pub(super) reply: oneshot::Sender<Result<(), String>>,
}

/// The names of adapters, as everybody may read them.
#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    loaded: BTreeMap<String, (AdapterId, PathBuf)>,
    /// Names that were let go of, each with the number of its letting go. The model alone
    /// must not answer for them.
    gone: BTreeMap<String, u64>,
    /// How often an adapter was let go of.
    unloads: u64,
}

impl Names {
    /// Lists the adapters and their folders.
    pub(super) fn list(&self) -> impl Iterator<Item = (&str, String)> {
        let folder = |folder: &PathBuf| folder.display().to_string();
        self.loaded.iter().map(move |(name, (_, path))| (name.as_str(), folder(path)))
    }

    /// Returns the same as SGLang's `loaded_adapters`.
    pub(super) fn object(&self) -> Value {
        let member = |(name, folder): (&str, String)| (name.to_owned(), Value::from(folder));
        Value::Object(self.list().map(member).collect::<Map<_, _>>())
    }

    /// Returns the adapter that the `model` of a request names: by its name alone, or
    /// as `model:adapter`. Other models' names may have a colon, too.
    pub(super) fn of_model(&self, model: &str, served: &str) -> Result<Option<AdapterId>, Failure> {
        let found = |name: &str| self.loaded.get(name).map(|(id, _)| *id);
        let unknown = |name: &str| Err(self.unknown("model", name));
        let parts = model.split_once(':');
        match (found(model).or_else(|| found(parts?.1)), parts) {
            (Some(id), _) => Ok(Some(id)),
            (None, Some((base, name))) if base == served || self.gone.contains_key(name) => {
                unknown(name)
            }
            (None, _) if self.gone.contains_key(model) => unknown(model),
            (None, _) => Ok(None),
        }
    }

    /// Returns the adapter that a `lora_path` names; none if it is empty.
    pub(super) fn of_path(&self, name: Option<&str>) -> Result<Option<AdapterId>, Failure> {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(None) };
        match self.loaded.get(name) {
            Some((id, _)) => Ok(Some(*id)),
            None => Err(self.unknown("lora_path", name)),
        }
    }

    fn unknown(&self, member: &'static str, name: &str) -> Failure {
        let message = match self.loaded.is_empty() {
            true => format!("no adapter `{name}` is loaded: there is none; load it first"),
            false => {
                let names: Vec<_> = self.loaded.keys().map(|name| format!("`{name}`")).collect();
                format!("no adapter `{name}` is loaded; these are: {}", names.join(", "))
            }
        };
        Failure::of(member, message)
    }
}

/// An adapter on its model.
#[derive(Debug)]
struct Worn {
    model: Model,
    /// Version of its own, once one was named after it came.
    version: Option<Arc<str>>,
}

/// All adapters, on the compute thread.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    next: AdapterId,
    worn: BTreeMap<AdapterId, Worn>,
    pub(super) names: Names,
}

impl Shelf {
    /// Returns the model with an adapter, or alone.
    pub(super) fn model<'a>(&'a self, id: Option<AdapterId>, base: &'a Model) -> Option<&'a Model> {
        match id {
            None => Some(base),
            Some(id) => self.worn.get(&id).map(|worn| &worn.model),
        }
    }

    /// Returns the version of what an adapter makes.
    pub(super) fn version(&self, id: Option<AdapterId>, base: &Arc<str>) -> Arc<str> {
        let own = id.and_then(|id| self.worn.get(&id)?.version.clone());
        own.unwrap_or_else(|| base.clone())
    }

    /// Reads an adapter and puts it beside the model.
    pub(super) fn load(&mut self, name: &str, folder: PathBuf, base: &Model) -> Result<(), String> {
        if let Some((_, there)) = self.names.loaded.get(name) {
            return Err(format!(
                "an adapter `{name}` is loaded already, from `{}`: unload it first, or take another name",
                there.display()
            ));
        }
        let read = Adapter::read(&folder, &base.config, base.device());
        let worn = read.and_then(|adapter| base.beside(&adapter));
        let model = worn.map_err(|error| error.to_string())?;
        self.next += 1;
        self.worn.insert(self.next, Worn { model, version: None });
        self.names.gone.remove(name);
        self.names.loaded.insert(name.to_owned(), (self.next, folder));
        Ok(())
    }

    /// Lets go of an adapter: no further request gets it.
    pub(super) fn unload(&mut self, name: &str) -> Result<(), String> {
        if self.names.loaded.remove(name).is_none() {
            return Err(self.names.unknown("lora_name", name).message);
        }
        self.names.unloads += 1;
        let (gone, now) = (&mut self.names.gone, self.names.unloads);
        gone.insert(name.to_owned(), now);
        if gone.len() > MOST_GONE {
            // Of that many nobody asks for the one that was let go of longest ago.
            let first = gone.values().copied().min();
            gone.retain(|_, unload| Some(*unload) != first);
        }
        Ok(())
    }

    /// Whether an adapter is there that has not been let go of.
    pub(super) fn has(&self, id: AdapterId) -> bool {
        self.names.loaded.values().any(|(known, _)| *known == id)
    }

    /// Drops what was let go of and is in nobody's use.
    pub(super) fn tidy(&mut self, used: impl Fn(AdapterId) -> bool) {
        let loaded = &self.names.loaded;
        let named = |id: AdapterId| loaded.values().any(|(known, _)| *known == id);
        self.worn.retain(|id, _| named(*id) || used(*id));
    }

    /// Gives a version to the adapters that came since the last one was named.
    pub(super) fn name_version(&mut self, version: &Arc<str>) {
        for worn in self.worn.values_mut() {
            worn.version.get_or_insert_with(|| version.clone());
        }
    }

    /// Returns all of it on top of another model: what they make has its version then.
    pub(super) fn on(&self, base: &Model) -> Result<Self, String> {
        let mut worn = BTreeMap::new();
        for (id, Worn { model, .. }) in &self.worn {
            let Some(adapter) = model.adapter() else { continue };
            let model = base.beside(adapter).map_err(|error| error.to_string())?;
            worn.insert(*id, Worn { model, version: None });
        }
        Ok(Self { next: self.next, worn, names: self.names.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_gone_are_refused_and_not_kept_for_ever() {
        let mut shelf = Shelf::default();
        let name = |id: AdapterId| format!("step-{id}");
        for id in 1..=MOST_GONE as AdapterId + 10 {
            shelf.names.loaded.insert(name(id), (id, PathBuf::new()));
            shelf.unload(&name(id)).unwrap();
        }
        assert_eq!(shelf.names.gone.len(), MOST_GONE);
        let asked = |id: AdapterId| shelf.names.of_model(&name(id), "m");
        // The model answers to any name that it does not know.
        assert_eq!(asked(10).unwrap(), None);
        for id in [11, MOST_GONE as AdapterId + 10] {
            assert!(asked(id).unwrap_err().message.contains("is loaded: there is none"), "{id}");
        }
        assert!(shelf.unload("m").is_err());
    }

    #[test]
    fn a_name_that_was_let_go_of_last_is_remembered_longest() {
        let mut shelf = Shelf::default();
        let name = |id: AdapterId| format!("step-{id}");
        let last = MOST_GONE as AdapterId + 1;
        for id in 1..=last {
            shelf.names.loaded.insert(name(id), (id, PathBuf::new()));
        }
        // The first that was loaded stays to the end.
        for id in (2..=last).chain([1]) {
            shelf.unload(&name(id)).unwrap();
        }
        let asked = |id: AdapterId| shelf.names.of_model(&name(id), "m");
        assert_eq!(asked(2).unwrap(), None);
        for id in [1, 3, last] {
            assert!(asked(id).is_err(), "{id}");
        }
    }
}
