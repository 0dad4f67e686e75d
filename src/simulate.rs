//! People made up to talk to an agent: each wants something of every answer,
//! complains when it is missing and praises when it is there.
//!
//! Three pure parts (what a persona is, whether a reply obeys it, after how many
//! sessions an agent adapted) and one that talks: [`Person`], over the client of
//! inference servers. Deliberately absent: judging and training. The agent learns
//! of a person what it learns of anybody: words.

mod measure;
mod person;
mod persona;
mod questions;
mod rule;
mod shuffle;

use std::path::PathBuf;

use crate::engine;
use crate::template;

pub use measure::{IN_A_ROW, LEAST_HINTED, MOST_BARE, Visit, has_room, sessions_to_adapt};
pub use person::{Asking, Person, Probe};
pub use persona::Persona;
pub use questions::Questions;
pub use rule::{Reply, Rule};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A persona cannot be used.
    #[error("{place}: {message}")]
    Persona {
        /// The file.
        place: String,
        /// What is wrong with it.
        message: String,
    },
    /// A file of questions cannot be used.
    #[error("`{}`: {message}", path.display())]
    Questions {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The rule asks for what the server does not tell.
    #[error("the rule needs the {what} of an answer, which the server does not tell")]
    Untold {
        /// The missing fact.
        what: &'static str,
    },
    /// The engine that gives the person words said nothing.
    #[error("`{url}` gave the person no words")]
    Wordless {
        /// The engine.
        url: String,
    },
    /// An engine failed.
    #[error(transparent)]
    Engine(#[from] engine::Error),
    /// A prompt cannot be made.
    #[error(transparent)]
    Template(#[from] template::Error),
}
