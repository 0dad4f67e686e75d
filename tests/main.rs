//! The one test binary.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod architecture;
mod cli;
mod forge;
mod fuzzed;
mod golden;
mod harness;
mod pipe;
mod room;

#[global_allocator]
static ALLOCATOR: harness::memory::Counting = harness::memory::Counting;
