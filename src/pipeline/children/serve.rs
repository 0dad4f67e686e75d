//! The process that chats are sent to.

use super::super::run::SHIP;
use super::super::{Child, Error, Serves};
use super::{Cast, FRONT, SERVE_TIMEOUT, Tier, front, path, policy_engines};

impl Cast<'_> {
    pub(super) fn serve(&self) -> Result<Child, Error> {
        let front = front(self.given)?;
        let engines = self.engines_of_serve()?;
        let mut argv = self.command("serve");
        let planned = self.plan.engines_for(Serves::Policy).next().is_some();
        // What a flag asks of others has to stand beside it on the command line.
        match (self.given)("serve", "model").filter(|_| !planned) {
            Some(model) => {
                let listen = engines[0].trim_start_matches("http://").to_owned();
                let words = ["--model".to_owned(), model, "--engine-listen".to_owned(), listen];
                argv.extend(words);
            }
            None => {
                argv.extend(engines.iter().flat_map(|url| ["--engine".to_owned(), url.clone()]));
            }
        }
        let listen = (self.given)("serve", "listen").unwrap_or_else(|| FRONT.to_owned());
        let spool = path(&self.wishes.run.turns())?;
        argv.extend(["--listen".to_owned(), listen, "--spool".to_owned(), spool]);
        let ship = self.wishes.run.hops(&[]).into_iter().find(|hop| hop.stage == SHIP);
        if let Some(hop) = ship {
            argv.extend(["--ship".to_owned(), path(&hop.into)?]);
        }
        let mut child = self.child("serve", Tier::Serve, argv);
        child.ready = Some((format!("{front}/readyz"), SERVE_TIMEOUT));
        child.vital = true;
        Ok(child)
    }

    /// Returns the engines that it stands before: those that serve `policy`. Several of
    /// them may have a router before them, which then gets the chats, and they the
    /// weights.
    fn engines_of_serve(&self) -> Result<Vec<String>, Error> {
        let wanting = |problem: &str| Err(Error::Wanting { problem: problem.to_owned() });
        let planned = self.plan.engines_for(Serves::Policy).count();
        match (self.given)("serve", "engine") {
            Some(router) if planned > 1 => return Ok(vec![router]),
            _ if planned > 0 && self.given("serve", &["engine", "model"]) => {
                return wanting(
                    "`[serve]` has an engine of its own, and `[engines]` another for it: leave \
                     one out",
                );
            }
            _ => {}
        }
        let engines = policy_engines(self.plan, self.given);
        match engines.is_empty() {
            false => Ok(engines),
            true => wanting(
                "nobody answers the chats: write `[serve] model = DIR`, or an `[engines.NAME]` \
                 that serves `policy`",
            ),
        }
    }
}
