//! A scheduler of the tiny model, to be led by the hand.

use std::path::{Path, PathBuf};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::model::{Cache, LoadOptions, Model, SamplingParams};
use crate::serving::compute::{Board, Event, Job, Limits, Plan, Token};

use super::Scheduler;

/// Tokens for which there is room if that is not what is tried.
pub(super) const LARGE: usize = 1 << 14;

pub(super) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny-qwen3")
}

pub(super) fn model() -> Model {
    Model::load(&folder(), &LoadOptions::default()).unwrap()
}

/// Writes the same model with other weights into a folder.
pub(super) fn write_other(into: &Path) {
    write_changed(into, |weight| weight * 1.03);
}

/// Writes the same model with each of its weights changed.
pub(super) fn write_changed(into: &Path, change: impl Fn(f32) -> f32) {
    for entry in std::fs::read_dir(folder()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), into.join(entry.file_name())).unwrap();
    }
    let file = into.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for weight in bytes[8 + header..].chunks_exact_mut(4) {
        let value = f32::from_le_bytes((*weight).try_into().unwrap());
        weight.copy_from_slice(&change(value).to_le_bytes());
    }
    std::fs::write(&file, bytes).unwrap();
}

/// Returns a scheduler with room for so many tokens of one sequence, with pieces of so many
/// tokens, and with so many bytes for what outlives its sequence.
pub(super) fn scheduler(tokens: usize, prefill_chunk: usize, prefix_cache: usize) -> Scheduler {
    let (model, load) = (model(), LoadOptions::default());
    let kv_memory = Cache::bytes_of(&model.config, tokens);
    let limits = Limits { max_running: 16, kv_memory, prefill_chunk, prefix_cache, load };
    Scheduler::new(model, limits, Board::new("0".to_owned(), folder()))
}

/// Asks for a greedy answer of so many tokens.
pub(super) fn queue(
    scheduler: &mut Scheduler,
    rid: &str,
    prompt: &[i64],
    max_new: usize,
) -> UnboundedReceiver<Event> {
    let (events, told) = unbounded_channel();
    let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
    let plan = Plan { sampling, max_new, stop_ids: vec![], top: 0, chosen: vec![] };
    scheduler.queue(Job { rid: rid.into(), prompt: prompt.into(), adapter: None, plan, events });
    told
}

/// Gives steps until nobody is left; returns how many.
pub(super) fn finish(scheduler: &mut Scheduler) -> usize {
    let mut steps = 0;
    while !(scheduler.waiting.is_empty() && scheduler.running.is_empty()) {
        scheduler.admit();
        scheduler.step();
        steps += 1;
        assert!(steps < 10_000, "it does not end");
    }
    steps
}

/// Returns how many tokens of the prompt were not computed, and the tokens told since.
pub(super) fn told(events: &mut UnboundedReceiver<Event>) -> (Option<usize>, Vec<Token>) {
    let (mut cached, mut tokens) = (None, Vec::new());
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Begun(count) => cached = Some(count),
            Event::Token(token) => tokens.push(token),
            Event::End(_) => {}
            Event::Failed(failure) => panic!("{failure}"),
        }
    }
    (cached, tokens)
}
