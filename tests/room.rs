//! One file per room of the library, through its public interface.

mod advantage;
mod cache;
mod capture;
mod engine;
mod gguf;
mod health;
mod hint;
mod interchange;
mod journal;
mod judge;
mod listener;
#[cfg(feature = "torch")]
mod loss;
#[cfg(feature = "torch")]
mod model;
mod pipeline;
mod privacy;
mod proxy;
mod report;
#[cfg(feature = "torch")]
pub(crate) mod serving;
mod replay;
mod session;
mod simulate;
mod stage;
mod sync;
mod store;
mod table;
mod tensors;
mod teacher_lp;
mod template;
#[cfg(feature = "torch")]
pub(crate) mod train;
mod trajectory;
mod wire;
