//! The oclaw library: everything the `oclaw` program does, without a terminal.
//!
//! Nobody in here prints, exits, reads the command line or the environment, or
//! installs a logger. A room may use only rooms that `tests/architecture.rs`
//! lets it use; that table is the architecture.

pub mod trajectory;
pub mod table;
pub mod store;
pub mod stage;
pub mod wire;
pub mod tensors;
pub mod gguf;
pub mod template;
pub mod listener;
pub mod session;
pub mod capture;
pub mod journal;
pub mod engine;
pub mod judge;
pub mod hint;
pub mod teacher_lp;
pub mod advantage;
pub mod health;
pub mod report;
pub mod proxy;
#[cfg(feature = "torch")]
pub mod loss;
#[cfg(feature = "torch")]
pub mod model;
#[cfg(feature = "torch")]
pub mod train;
#[cfg(feature = "torch")]
pub mod serving;
pub mod sync;
pub mod replay;
pub mod simulate;
pub mod cache;
pub mod interchange;
pub mod privacy;
pub mod pipeline;
