//! Sequences that begin alike are computed together and find the same numbers as
//! each for itself.

use oclaw::model::{Dtype, LoadOptions, Model, Score, Scored};

use super::{FAMILIES, folder, tokens};

/// What a shared beginning may change of a log-prob in f32: the order of a few sums.
const TOLERANCE: f32 = 2e-5;
/// What it may add in bf16 to how far a log-prob is from its value in f32.
const ADDED: f32 = 2e-2;

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

fn load(name: &str, dtype: Dtype) -> Model {
    Model::load(&folder(name), &LoadOptions { dtype: Some(dtype), ..LoadOptions::default() })
        .unwrap()
}

fn alone(model: &Model, request: &Score) -> Scored {
    model.score(std::slice::from_ref(request)).remove(0)
}

/// Returns the largest difference between two lists of the same length.
fn off(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_shared_beginning_changes_no_number() {
    for name in FAMILIES {
        let model = load(name, Dtype::F32);
        let requests = requests();
        for (request, together) in requests.iter().zip(model.score(&requests)) {
            let alone = alone(&model, request);
            assert_eq!(together.log_probs.len(), request.ids.len() - request.start);
            for (what, found, wanted) in [
                ("log-probs", &together.log_probs, &alone.log_probs),
                ("top log-probs", &together.top_log_probs, &alone.top_log_probs),
                ("chosen", &together.chosen_log_probs, &alone.chosen_log_probs),
            ] {
                let off = off(found, wanted);
                assert!(off <= TOLERANCE, "{name} {what}: off by {off:e}");
            }
        }
    }
}

/// Two ways to round to bf16 differ from each other as they do from f32: neither may
/// be the worse one.
#[test]
fn a_shared_beginning_is_as_near_in_bf16() {
    for name in FAMILIES {
        let (exact, model) = (load(name, Dtype::F32), load(name, Dtype::Bf16));
        let requests = requests();
        let (mut together_off, mut alone_off) = (0.0_f32, 0.0_f32);
        for (request, together) in requests.iter().zip(model.score(&requests)) {
            let wanted = alone(&exact, request).log_probs;
            together_off = together_off.max(off(&together.log_probs, &wanted));
            alone_off = alone_off.max(off(&alone(&model, request).log_probs, &wanted));
        }
        assert!(
            together_off <= alone_off + ADDED,
            "{name}: {together_off:e} from f32 together, {alone_off:e} alone"
        );
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
    // The trunk and the tails; the same sequence twice is one, and so is that of 705
    // tokens with which the one of 960 begins.
    assert_eq!(computed, 700 + 40 + 330 + 260 + 40);
    let scored: Option<Vec<_>> = scored.into_iter().collect();
    assert_eq!(scored.unwrap(), model.score(&requests));
}
