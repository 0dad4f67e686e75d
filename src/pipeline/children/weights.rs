//! The process that hands the weights back.

use super::super::{Child, Error};
use super::{Cast, Tier, front, path, policy_engines};

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
