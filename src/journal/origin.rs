//! What a shard says about the ids in it.

use std::collections::BTreeSet;

use crate::table::Provenance;

use super::entry::{Entry, Origin};

/// Returns the provenance of a shard. Its rows may be of several runs, whose
/// engines need not have had the same tokenizer.
pub(super) fn provenance(run: &Provenance, entries: &[Entry]) -> Provenance {
    let has_ids = |entry: &&Entry| entry.prompt_ids.is_some() || entry.response_ids.is_some();
    let origins: Vec<&Origin> = entries.iter().filter(has_ids).map(|entry| &entry.origin).collect();
    let of = |hash: fn(&Origin) -> Option<&str>| joined(origins.iter().map(|origin| hash(origin)));
    Provenance {
        lines: run.lines.clone(),
        tokenizer_hash: of(|origin| origin.tokenizer_hash.as_deref()),
        chat_template_hash: of(|origin| origin.chat_template_hash.as_deref()),
    }
}

/// Joins all different hashes by commas. Nothing is known of all rows as soon as
/// it is not known of one.
fn joined<'a>(hashes: impl Iterator<Item = Option<&'a str>>) -> Option<String> {
    let hashes: BTreeSet<&str> = hashes.collect::<Option<_>>()?;
    (!hashes.is_empty()).then(|| hashes.into_iter().collect::<Vec<_>>().join(","))
}
