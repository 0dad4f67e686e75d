//! Sequences that begin alike are computed together and find the same numbers as
//! each for itself.

use oclaw::model::{Dtype, LoadOptions, Model, Score};

use super::{FAMILIES, folder, tokens};

/// What a shared beginning may change of a log-prob: the order of a few sums in
/// f32; where products are rounded to bf16, now and then a last place of those.
const TOLERANCES: [(Dtype, f32); 2] = [(Dtype::F32, 2e-5), (Dtype::Bf16, 5e-2)];

/// Tails that leave one trunk at different places; some longer than a block of
/// queries, one without an own token, one that starts within the trunk, and one
/// that has nothing to do with the others.
fn requests() -> Vec<Score> {
    let trunk = tokens(700, 1);
    let with = |shared: usize, tail: usize, start: usize| {
        let ids = [trunk[..shared].to_vec(), tokens(tail, shared + 3)].concat();
        let chosen = (0..2 * (ids.len() - start)).map(|place| place as i64 % 1000).collect();
        Score { ids, start, temperature: 0.7, top_k: 3, chosen, entropy: false }
    };
    vec![
        with(600, 40, 610),
        with(300, 330, 250),
        with(700, 5, 690),
        with(700, 260, 720),
        with(650, 0, 640),
        with(700, 5, 690),
        Score { ids: tokens(40, 9), start: 3, top_k: 3, ..Score::default() },
    ]
}

#[test]
fn a_shared_beginning_changes_no_number() {
    for (dtype, tolerance) in TOLERANCES {
        for name in FAMILIES {
            let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
            let model = Model::load(&folder(name), &options).unwrap();
            let requests = requests();
            for (place, (request, together)) in
                requests.iter().zip(model.score(&requests)).enumerate()
            {
                let alone = model.score(std::slice::from_ref(request)).remove(0);
                let near = |what: &str, found: &[f32], wanted: &[f32]| {
                    assert_eq!(found.len(), wanted.len(), "{name} {place} {what}");
                    let off = found.iter().zip(wanted).map(|(a, b)| (a - b).abs());
                    let most = off.fold(0.0, f32::max);
                    assert!(most <= tolerance, "{name} {dtype:?} {place} {what}: off by {most:e}");
                };
                assert_eq!(together.log_probs.len(), request.ids.len() - request.start);
                near("log-probs", &together.log_probs, &alone.log_probs);
                near("top log-probs", &together.top_log_probs, &alone.top_log_probs);
                near("chosen", &together.chosen_log_probs, &alone.chosen_log_probs);
            }
        }
    }
}

#[test]
fn a_shared_beginning_is_computed_once() {
    let model = Model::load(&folder(FAMILIES[0]), &LoadOptions::default()).unwrap();
    let requests = requests();
    let sequences: Vec<_> =
        requests.iter().map(|request| (&request.ids[..], request.start)).collect();
    let mut scored = vec![None; requests.len()];
    let computed = model.each_states(&sequences, |place, states| {
        scored[place] = Some(model.read(&states, &requests[place]));
    });
    // The trunk and the tails; the same sequence twice is one.
    assert_eq!(computed, 700 + 40 + 330 + 5 + 260 + 40);
    let scored: Option<Vec<_>> = scored.into_iter().collect();
    assert_eq!(scored.unwrap(), model.score(&requests));
}
