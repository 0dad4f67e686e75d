//! What travels over the wire: server-sent events, JSON that is not quite JSON,
//! the places of members inside JSON bytes, the OpenAI dialect's requests, figures in
//! Prometheus' format, and how keys are compared.
//!
//! Everything here is lenient on purpose: servers and gateways differ, and the
//! reader of a foreign answer must neither crash nor hide what it saw. Absent:
//! sockets, and any opinion about what to do with what was read.

pub mod json;
pub mod openai;
pub mod prometheus;
pub mod secret;
pub mod sglang;
pub mod span;
pub mod sse;
pub mod vllm;
