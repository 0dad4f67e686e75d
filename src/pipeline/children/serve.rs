//! The process that chats are sent to.

use super::super::{Child, Error, Serves};
use super::{Cast, FRONT, SERVE_TIMEOUT, Tier, front, path, policy_engines};

impl Cast<'_> {
    pub(super) fn serve(&self) -> Result<Child, Error> {
        let front = front(self.given)?;
        let engine = self.engine_of_serve()?;
        let mut argv = self.command("serve");
        let planned = self.plan.engines_for(Serves::Policy).next().is_some();
        // What a flag asks of others has to stand beside it on the command line.
        match (self.given)("serve", "model").filter(|_| !planned) {
            Some(model) => {
                let listen = engine.trim_start_matches("http://").to_owned();
                let words = ["--model".to_owned(), model, "--engine-listen".to_owned(), listen];
                argv.extend(words);
            }
            None => argv.extend(["--engine".to_owned(), engine]),
        }
        let listen = (self.given)("serve", "listen").unwrap_or_else(|| FRONT.to_owned());
        let spool = path(&self.wishes.run.turns())?;
        argv.extend(["--listen".to_owned(), listen, "--spool".to_owned(), spool]);
        let mut child = self.child("serve", Tier::Serve, argv);
        child.ready = Some((format!("{front}/readyz"), SERVE_TIMEOUT));
        child.vital = true;
        Ok(child)
    }

    /// Returns the engine that it stands before. Of several that serve `policy` it
    /// cannot choose: they get the weights, and chats go to what stands before them.
    fn engine_of_serve(&self) -> Result<String, Error> {
        let wanting = |problem: String| Err(Error::Wanting { problem });
        let planned = self.plan.engines_for(Serves::Policy).count();
        let own = self.given("serve", &["engine", "model"]);
        match (planned, (self.given)("serve", "engine")) {
            (2.., Some(router)) => return Ok(router),
            (2.., None) => {
                return wanting(format!(
                    "{planned} of `[engines]` serve `policy`, and `serve` stands before one \
                     address: name that of a router before them, `[serve] engine = URL`"
                ));
            }
            (1, _) if own => {
                return wanting(
                    "`[serve]` has an engine of its own, and `[engines]` another for it: leave \
                     one out"
                        .to_owned(),
                );
            }
            _ => {}
        }
        let mut engines = policy_engines(self.plan, self.given).into_iter();
        match (engines.next(), engines.next()) {
            (Some(engine), None) => Ok(engine),
            (Some(_), Some(_)) => wanting(
                "`[serve] engine` names several, and `serve` stands before one: name a router, \
                 and each engine as `[engines.NAME]`"
                    .to_owned(),
            ),
            (None, _) => wanting(
                "nobody answers the chats: write `[serve] model = DIR`, or an `[engines.NAME]` \
                 that serves `policy`"
                    .to_owned(),
            ),
        }
    }
}
