//! Weights that a checkpoint has in bf16 may stay so in memory while the products are in
//! f32, where a matrix unit takes them: they are the same numbers in half the memory.

use oclaw::model::{Dtype, LoadOptions, Model, Score};
use tch::Kind;

use super::{FAMILIES, assert_steady, folder, tokens};

/// Loads a model of bf16 weights for products in f32, held in bf16 and in f32.
fn both(name: &str) -> [Model; 2] {
    let checkpoint = tempfile::tempdir().unwrap();
    let model = Model::load(&folder(name), &LoadOptions::default()).unwrap();
    model.save(&folder(name), checkpoint.path(), Some(Dtype::Bf16)).unwrap();
    [true, false].map(|narrow| {
        let options = LoadOptions { dtype: Some(Dtype::F32), narrow, ..LoadOptions::default() };
        Model::load(checkpoint.path(), &options).unwrap()
    })
}

/// Whether this processor has the unit, by what Linux tells of it.
fn has_unit() -> bool {
    let facts = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    ["amx_bf16", "amx_tile", "avx512_bf16"].iter().all(|flag| facts.contains(flag))
}

#[test]
fn they_are_held_in_bf16_and_multiplied_in_f32() {
    let narrow = if has_unit() { Kind::BFloat16 } else { Kind::Float };
    for name in FAMILIES {
        for (model, kind) in both(name).iter().zip([narrow, Kind::Float]) {
            assert_eq!(model.dtype(), Dtype::F32);
            for (name, weight) in model.parameters() {
                let wanted = if weight.dim() == 1 { Kind::Float } else { kind };
                assert_eq!(weight.kind(), wanted, "{name}");
            }
        }
    }
}

/// What is scored is what is trained, to the bit, however the weights are held.
#[test]
fn scores_are_the_same_to_the_bit() {
    let request = Score { ids: tokens(90, 1), start: 1, top_k: 3, ..Score::default() };
    for name in FAMILIES {
        let [narrow, wide] = both(name);
        let [found, wanted] =
            [narrow, wide].map(|model| model.score(std::slice::from_ref(&request)).remove(0));
        assert_eq!(found.log_probs, wanted.log_probs, "{name}");
        assert_eq!(found.top_log_probs, wanted.top_log_probs, "{name}");
    }
}

/// A prompt of many rows, then one row at a time: only the order of sums may differ.
#[test]
fn logits_are_those_of_f32() {
    for name in FAMILIES {
        let [narrow, wide] = both(name);
        let prompt = tokens(70, 2);
        let mut caches = (narrow.cache(), wide.cache());
        for part in [&prompt[..60], &[5], &[9], &[700]] {
            let found = narrow.step(&mut [(part, &mut caches.0)]);
            let wanted = wide.step(&mut [(part, &mut caches.1)]);
            assert_steady(name, &found, &wanted);
        }
    }
}

/// More streams than vectors take at a time.
#[test]
fn a_token_each_of_many_does_not_depend_on_the_others_to_the_bit() {
    if !has_unit() {
        eprintln!("skipped: this processor has no matrix unit (AMX)");
        return;
    }
    for name in FAMILIES {
        let [model, _] = both(name);
        let prompts: Vec<_> = (0..20).map(|place| tokens(2 + 3 * place, place)).collect();
        let mut caches: Vec<_> = prompts.iter().map(|_| model.cache()).collect();
        for (prompt, cache) in prompts.iter().zip(&mut caches) {
            let _ = model.step(&mut [(prompt, cache)]);
        }
        let mut forks: Vec<_> = caches.iter().map(|cache| cache.fork(cache.len())).collect();
        let mut batch: Vec<_> = caches.iter_mut().map(|cache| (&[5_i64][..], cache)).collect();
        let together = model.step(&mut batch);
        for (place, cache) in forks.iter_mut().enumerate() {
            let alone = model.step(&mut [(&[5], cache)]);
            assert_eq!(alone, together.narrow(0, place as i64, 1), "{name}, sequence {place}");
        }
    }
}
