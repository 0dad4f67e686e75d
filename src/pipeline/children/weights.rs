//! The process that hands the weights back.

use super::super::{Child, EnginePlan, Error, Serves};
use super::{Cast, Tier, Wishes, front, path, policy_engines};

impl Cast<'_> {
    pub(super) fn sync(&self) -> Result<Child, Error> {
        let mut argv = self.command("sync-weights");
        let mut flag = |name: &str, value: String| argv.extend([format!("--{name}"), value]);
        flag("follow", path(&self.wishes.run.policy())?);
        if !self.given("sync-weights", &["engine"]) {
            policy_engines(self.plan, self.given).into_iter().for_each(|url| flag("engine", url));
        }
        if !self.given("sync-weights", &["proxy"]) {
            flag("proxy", front(self.given)?);
            if let Some(file) = self.key_of_serve() {
                flag("proxy-key-file", file);
            }
        }
        flag("every", self.wishes.weight_sync_interval.to_string());
        Ok(self.child("sync-weights", Tier::Stage, argv))
    }

    /// Returns what an engine that serves the policy begins with: the newest one, so that
    /// the start model answers no chats until the weights are pushed. Not where they have
    /// to pass a gate first, go beside the model as adapters, or go elsewhere.
    pub(super) fn policies(&self, engine: &EnginePlan) -> Result<Vec<String>, Error> {
        let Wishes { run, without, .. } = self.wishes;
        let pushed = !without.iter().any(|stage| stage == "sync-weights");
        let process = self.plan.processes.get("sync-weights");
        let otherwise = ["require-gate", "adapter", "engine"].into_iter().any(|key| {
            let variable = format!("OCLAW_SYNC_WEIGHTS_{}", key.replace('-', "_").to_uppercase());
            self.given("sync-weights", &[key])
                || process.is_some_and(|process| process.env.contains_key(&variable))
        });
        let has_version = self.given("engine", &["weight-version"])
            || engine.process.env.contains_key("OCLAW_ENGINE_WEIGHT_VERSION");
        let policy = engine.serves == Serves::Policy && run.store.is_none();
        match policy && pushed && !otherwise && !has_version {
            true => Ok(vec!["--policies".to_owned(), path(&run.policy())?]),
            false => Ok(Vec::new()),
        }
    }

    /// Returns the file with a key that `oclaw serve` takes new weights by, if it
    /// wants one and nobody has said which.
    fn key_of_serve(&self) -> Option<String> {
        // The key itself is a variable alone, here or in the table of the process.
        let process = self.plan.processes.get("sync-weights");
        let has_own = self.given("sync-weights", &["proxy-key-file", "proxy-key"])
            || process.is_some_and(|it| it.env.contains_key("OCLAW_SYNC_WEIGHTS_PROXY_KEY"));
        let wanted = ["control-key-file", "key-file"];
        let mut files = wanted.iter().filter_map(|key| (self.given)("serve", key));
        files.next().filter(|_| !has_own)
    }
}
