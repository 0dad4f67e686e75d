//! What the loop itself says to its processes: a setting of the file or of the
//! environment that says otherwise would be passed over, and is refused instead.

use super::super::{Error, Origin, Serves};
use super::Cast;

/// Stages that follow one folder into another.
const SHARDS: &[&str] = &["judge", "hint", "teacher-lp", "advantage"];
const FOLLOWERS: &[&str] = &["judge", "hint", "teacher-lp", "advantage", "train"];
const TRAIN: &[&str] = &["train"];
const SYNC: &[&str] = &["sync-weights"];

/// A setting that a loop leaves no say.
struct Own {
    /// Whose it is.
    sections: &'static [&'static str],
    keys: &'static [&'static str],
    /// Whether the loop says it.
    when: fn(&Cast<'_>) -> bool,
    /// What to do instead.
    instead: &'static str,
}

const OWN: [Own; 15] = [
    Own {
        sections: &["serve"],
        keys: &["spool"],
        when: always,
        instead: "turns go to `turns` in the folder of `[loop] run`",
    },
    Own {
        sections: &["serve"],
        keys: &["engine-listen"],
        when: |cast| !cast.serves_inside(),
        instead: "no engine is inside `serve`; an engine has its address in `[engines.NAME] url`",
    },
    Own {
        sections: FOLLOWERS,
        keys: &["follow"],
        when: always,
        instead: "stages meet in the folders of `[loop] run`, or of `[loop] store`",
    },
    Own {
        sections: SHARDS,
        keys: &["output"],
        when: always,
        instead: "stages meet in the folders of `[loop] run`, or of `[loop] store`",
    },
    Own {
        sections: SHARDS,
        keys: &["replace", "fill", "format", "dry-run"],
        when: always,
        instead: "a stage of a loop does each shard once, into another",
    },
    Own {
        sections: FOLLOWERS,
        keys: &["once"],
        when: always,
        instead: "a stage of a loop goes on until that ends",
    },
    Own {
        sections: TRAIN,
        keys: &["out"],
        when: always,
        instead: "policies go to `policy` in the folder of `[loop] run`, or of `[loop] store`",
    },
    Own {
        sections: TRAIN,
        keys: &["metrics"],
        when: always,
        instead: "they go to `metrics.jsonl` in the folder of `[loop] run`",
    },
    Own {
        sections: TRAIN,
        keys: &["when-idle", "spool"],
        when: |cast| cast.wishes.train_when_idle.is_some(),
        instead: "`[loop] train-when-idle` says it",
    },
    Own {
        sections: TRAIN,
        keys: &["hours"],
        when: |cast| !cast.wishes.train_hours.is_empty(),
        instead: "`[loop] train-hours` says it",
    },
    Own {
        sections: SYNC,
        keys: &["follow"],
        when: always,
        instead: "it follows `policy` in the folder of `[loop] run`, or of `[loop] store`",
    },
    Own {
        sections: SYNC,
        keys: &["every"],
        when: always,
        instead: "write `[loop] weight-sync-interval`",
    },
    Own {
        sections: SYNC,
        keys: &["version", "receipt", "rollback", "force", "wait"],
        when: always,
        instead: "it is about one push, and a loop pushes each policy as it comes",
    },
    Own {
        sections: &["engine"],
        keys: &["model", "listen"],
        when: |cast| cast.runs_engines(),
        instead: "an engine of a loop has `model` and `url` in `[engines.NAME]`",
    },
    Own {
        sections: &["engine"],
        keys: &["policies"],
        when: |cast| cast.runs_engines(),
        instead: "an engine that serves the policy begins with the newest of this run",
    },
];

fn always(_: &Cast<'_>) -> bool {
    true
}

impl Cast<'_> {
    /// Refuses what would have no effect.
    pub(super) fn check_own(&self) -> Result<(), Error> {
        let said = OWN.iter().filter(|own| (own.when)(self));
        for Own { sections, keys, instead, .. } in said {
            for section in sections.iter().filter(|section| self.runs(section)) {
                for key in *keys {
                    self.check_unsaid(section, key, instead)?;
                }
            }
        }
        Ok(())
    }

    fn check_unsaid(&self, section: &str, key: &str, instead: &str) -> Result<(), Error> {
        let variable = format!("OCLAW_{section}_{key}").replace('-', "_").to_uppercase();
        let problem = |name: &str| format!("{name} has no effect in a loop: {instead}");
        let process = self.plan.processes.get(section);
        if let Some(process) = process.filter(|process| process.env.contains_key(&variable)) {
            let problem = problem(&format!("`{variable}` in `[{section}] env`"));
            return Err(Error::Plan { line: process.line, problem });
        }
        if (self.given)(section, key).is_none() {
            return Ok(());
        }
        match self.plan.flags.get(&(section.to_owned(), key.to_owned())) {
            Some((_, line)) => {
                let problem = problem(&format!("`[{section}] {key}`"));
                Err(Error::Plan { line: *line, problem })
            }
            // Nothing else can have given it.
            None => {
                let problem = problem(&format!("`{variable}` in the environment"));
                Err(Error::Wanting { problem })
            }
        }
    }

    /// Whether a section is about a process of this loop.
    fn runs(&self, section: &str) -> bool {
        !self.wishes.without.iter().any(|stage| stage == section)
    }

    /// Whether `oclaw serve` has a model of its own.
    fn serves_inside(&self) -> bool {
        self.plan.engines_for(Serves::Policy).next().is_none()
            && !self.given("serve", &["engine"])
            && self.given("serve", &["model"])
    }

    /// Whether `oclaw engine` is a process of this loop.
    fn runs_engines(&self) -> bool {
        self.plan.engines.values().any(|engine| matches!(engine.origin, Origin::Model(_)))
    }
}
