//! Recorded numbers of independent implementations, every case found in the
//! folders named by `OCLAW_GOLDEN` and `OCLAW_MODELS` (default: `fixtures/`).

mod api;
mod chat;
mod gguf;
mod hints;
#[cfg(feature = "torch")]
mod hybrid;
#[cfg(feature = "torch")]
mod loss;
#[cfg(feature = "torch")]
mod model;
mod plain;
#[cfg(feature = "torch")]
mod train;
