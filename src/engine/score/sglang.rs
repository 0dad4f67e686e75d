//! Scoring through SGLang's `/generate`.
//!
//! Chosen ids go with a whole request, not with a position, so they are asked
//! for in blocks of positions, each with the union of its ids.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use reqwest::Method;
use serde_json::{Value, json};

use crate::wire::sglang::{GenerateAnswer, MetaInfo, TokenLogProb, TokenLogProbs};

use super::super::transport::Answer;
use super::super::{Engine, Error, NativeCall};
use super::{Listed, ScoreRequest, Scores, add_top, log_prob};

/// Positions that share a request for chosen ids.
const BLOCK: usize = 16;

pub(super) async fn score(engine: &Engine, request: &ScoreRequest) -> Result<Scores, Error> {
    let end = request.ids.len();
    let step = if request.chosen.is_empty() { end } else { BLOCK };
    let mut scores = Scores::default();
    let mut start = request.start;
    while start < end {
        let block = start..end.min(start + step);
        start = block.end;
        add_block(engine, request, block, &mut scores).await?;
    }
    Ok(scores)
}

async fn add_block(
    engine: &Engine,
    request: &ScoreRequest,
    block: Range<usize>,
    scores: &mut Scores,
) -> Result<(), Error> {
    let rows = block.start - request.start..block.end - request.start;
    let union: BTreeSet<i32> =
        rows.clone().flat_map(|row| request.chosen_at(row)).copied().collect();
    // What comes after a token says nothing about it. The entry at the start is
    // always null, so we start one earlier.
    let mut body = json!({
        "input_ids": request.ids[..block.end],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": true,
        "logprob_start_len": block.start - 1,
    });
    if request.top_k > 0 {
        body["top_logprobs_num"] = Value::from(request.top_k);
    }
    if !union.is_empty() {
        body["token_ids_logprob"] = union.iter().copied().collect();
    }
    let call = NativeCall {
        method: Method::POST,
        path: "/generate",
        body: Some(&body),
        timeout: None,
        retries: None,
    };
    let answer = engine.native(call).await?;
    let read: GenerateAnswer = answer.json()?;
    let meta = read.meta_info.unwrap_or_default();
    check_version(&answer, &meta, request.start == block.start, scores)?;
    let Some(entries) = &meta.input_token_logprobs else {
        return Err(answer.malformed("no `meta_info.input_token_logprobs`"));
    };
    scores.log_probs.extend(own(&answer, entries, &request.ids[block.start - 1..block.end])?);
    if request.top_k > 0 {
        let lists = lists(&answer, "input_top_logprobs", meta.input_top_logprobs, block.len())?;
        for (place, list) in lists.into_iter().enumerate() {
            add_top(scores, &answer, place + 1, request.top_k, list)?;
        }
    }
    if !union.is_empty() {
        let name = "input_token_ids_logprobs";
        let lists = lists(&answer, name, meta.input_token_ids_logprobs, block.len())?;
        for ((place, list), row) in lists.into_iter().enumerate().zip(rows) {
            let found = found(&answer, place + 1, &list, &union)?;
            let values = request.chosen_at(row).iter().map(|id| found[id]);
            scores.chosen_log_probs.extend(values);
        }
    }
    Ok(())
}

/// All parts must come from the same weights, as far as the server tells.
fn check_version(
    answer: &Answer,
    meta: &MetaInfo,
    first: bool,
    scores: &mut Scores,
) -> Result<(), Error> {
    if first {
        scores.version.clone_from(&meta.weight_version);
    }
    if scores.version != meta.weight_version {
        return Err(answer.malformed("the weights changed between the parts of one scoring"));
    }
    Ok(())
}

/// Drops the null first entry and holds the rest against the ids.
fn own(answer: &Answer, entries: &[TokenLogProb], ids: &[i32]) -> Result<Vec<f32>, Error> {
    if entries.len() != ids.len() {
        let reason = format!("{} log-probs for {} tokens", entries.len(), ids.len());
        return Err(answer.malformed(reason));
    }
    let mut values = Vec::with_capacity(ids.len() - 1);
    for (place, (TokenLogProb(value, id, _), wanted)) in entries.iter().zip(ids).enumerate() {
        if *id != i64::from(*wanted) {
            let reason = format!("id {id} where {wanted} was sent, at place {place}");
            return Err(answer.malformed(reason));
        }
        if place > 0 {
            values.push(log_prob(answer, place, *value)?);
        }
    }
    Ok(values)
}

/// Returns the list of each position, without the null first one.
fn lists(
    answer: &Answer,
    name: &str,
    lists: Option<TokenLogProbs>,
    rows: usize,
) -> Result<Vec<Vec<Listed>>, Error> {
    let lists = lists.ok_or_else(|| answer.malformed(format!("no `meta_info.{name}`")))?;
    if lists.len() != rows + 1 {
        let reason = format!("{} lists of `{name}` for {} tokens", lists.len(), rows + 1);
        return Err(answer.malformed(reason));
    }
    let rest = lists.into_iter().enumerate().skip(1).map(|(place, list)| {
        let entry = |TokenLogProb(value, id, _)| Some((id, value?));
        let read: Option<Vec<Listed>> = list.and_then(|list| list.into_iter().map(entry).collect());
        read.ok_or_else(|| answer.malformed(format!("a null in `{name}` at place {place}")))
    });
    rest.collect()
}

/// Returns the log-probs of exactly the ids that were asked for.
fn found(
    answer: &Answer,
    place: usize,
    list: &[Listed],
    union: &BTreeSet<i32>,
) -> Result<HashMap<i32, f32>, Error> {
    if list.len() != union.len() {
        let reason = format!("{} chosen tokens for {} at place {place}", list.len(), union.len());
        return Err(answer.malformed(reason));
    }
    let mut found = HashMap::new();
    for (id, value) in list {
        let known = i32::try_from(*id).ok().filter(|id| union.contains(id));
        let Some(known) = known else {
            return Err(answer.malformed(format!("id {id} was not asked for, at place {place}")));
        };
        if found.insert(known, log_prob(answer, place, Some(*value))?).is_some() {
            return Err(answer.malformed(format!("id {id} twice at place {place}")));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(entries: &[(Option<f64>, i64)], ids: &[i32]) -> Result<Vec<f32>, String> {
        let answer = Answer { url: "u".to_owned(), body: Default::default() };
        let entries: Vec<_> =
            entries.iter().map(|(score, id)| TokenLogProb(*score, *id, None)).collect();
        own(&answer, &entries, ids).map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_entry_is_dropped() {
        let entries = [(None, 6), (Some(-1.25), 7), (Some(-0.5), 8)];
        assert_eq!(check(&entries, &[6, 7, 8]), Ok(vec![-1.25, -0.5]));
    }

    #[test]
    fn a_wrong_count_or_id_or_gap_is_refused() {
        let wrong = |entries: &[_]| check(entries, &[6, 7, 8]).unwrap_err();
        let count = wrong(&[(None, 7), (Some(-1.0), 8)]);
        assert!(count.ends_with("2 log-probs for 3 tokens"), "{count}");
        let id = wrong(&[(None, 6), (Some(-1.0), 9), (Some(-1.0), 8)]);
        assert!(id.ends_with("id 9 where 7 was sent, at place 1"), "{id}");
        let gap = wrong(&[(None, 6), (Some(-1.0), 7), (None, 8)]);
        assert!(gap.ends_with("no log-prob at place 2"), "{gap}");
    }
}
