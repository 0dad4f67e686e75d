//! Policies in bf16: how their weights are rounded, and what a restart goes on from.

use half::bf16;
use oclaw::train::{Draw, round};

use super::*;

const DRAW: Draw<'static> = Draw { seed: 7, step: 3, tensor: "model.norm.weight" };

fn rounded(policy: &Path) -> Vec<(String, Tensor)> {
    Tensor::read_safetensors(policy.join("model.safetensors")).unwrap()
}

/// Between 1 and the next number of bf16, 1 + 2^-7, a quarter of the way.
#[test]
fn the_mean_of_what_chance_rounds_is_the_weight() {
    let (value, step) = (1.0 + 0.25 / 128.0, 1.0 / 128.0_f64);
    let values = vec![value as f32; 1 << 16];
    let found = round(&values, Rounding::Stochastic, DRAW);
    let above = found.iter().filter(|found| found.to_f64() == 1.0 + step).count();
    let below = found.iter().filter(|found| found.to_f64() == 1.0).count();
    assert_eq!(above + below, values.len());
    // Five standard deviations of the mean: 5 step sqrt(3 / 16) / 256.
    let mean = found.iter().map(|found| found.to_f64()).sum::<f64>() / values.len() as f64;
    assert!((mean - value).abs() < 5.0 * step * 0.433 / 256.0, "{mean}");
    let nearest = round(&values, Rounding::Nearest, DRAW);
    assert!(nearest.iter().all(|found| found.to_f64() == 1.0));
}

#[test]
fn chance_depends_on_seed_step_and_tensor_alone() {
    let values: Vec<f32> = (1..1000).map(|number| 1.0 / number as f32).collect();
    let of = |draw: Draw<'_>| round(&values, Rounding::Stochastic, draw);
    let first = of(DRAW);
    assert!(first == of(DRAW));
    for other in [
        Draw { seed: 8, ..DRAW },
        Draw { step: 4, ..DRAW },
        Draw { tensor: "lm_head.weight", ..DRAW },
    ] {
        assert!(first != of(other), "{other:?}");
    }
    // Every one is a neighbour of its weight.
    for (found, value) in first.iter().zip(&values) {
        let way = (found.to_f32() - value).abs() / value;
        assert!(way < 1.0 / 128.0, "{value}: {found}");
    }
}

#[test]
fn what_needs_no_rounding_stays() {
    let exact = [0.0, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY];
    for seed in 0..100 {
        let found = round(&exact, Rounding::Stochastic, Draw { seed, ..DRAW });
        assert_eq!(found.iter().map(|it| it.to_f32()).collect::<Vec<_>>(), exact);
        // The largest f32 is above the largest bf16, and no infinity comes of it.
        let large = round(&[f32::MAX, f32::MIN], Rounding::Stochastic, Draw { seed, ..DRAW });
        assert_eq!(large, [bf16::MAX, bf16::MIN]);
        let none = round(&[f32::NAN], Rounding::Stochastic, Draw { seed, ..DRAW });
        assert!(none[0].is_nan());
    }
}

/// Steps that the nearest of bf16 swallows: the weights that training goes on from have
/// them all, the served ones on average.
#[test]
fn a_small_step_is_served_by_chance_and_kept_whole() {
    let small = |folder: &Path, rounding| Options {
        dtype: Some(Dtype::Bf16),
        rounding,
        rates: Rates { learning_rate: 1e-6, weight_decay: 0.0, ..Rates::default() },
        ..options("tiny-qwen3", folder)
    };
    let [nearest, stochastic] = [Rounding::Nearest, Rounding::Stochastic].map(|rounding| {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = Trainer::open(small(folder.path(), rounding)).unwrap();
        let trained = train(&mut trainer, batch(1..=2)).unwrap();
        let policy = trained.policy.unwrap();
        let held = |(name, it): &(String, Tensor)| (name.clone(), it.detach().copy());
        let weights: Vec<(String, Tensor)> = trainer.model().trained().iter().map(held).collect();
        drop(trainer);
        // What is written is the weights' rounding, and the share is of what is written.
        let start = rounded(&models().join("tiny-qwen3"));
        let (mut changed, mut all) = (0, 0);
        for (name, weight) in &weights {
            let numbers: Vec<f32> = weight.view(-1).try_into().unwrap();
            let draw = Draw { seed: 0, step: 1, tensor: name };
            let wanted = round(&numbers, rounding, draw);
            let find = |list: &[(String, Tensor)]| -> Vec<f32> {
                let (_, tensor) = list.iter().find(|(known, _)| known == name).unwrap();
                tensor.to_kind(Kind::Float).view(-1).try_into().unwrap()
            };
            let found = find(&rounded(&policy));
            let wrong = wanted.iter().zip(&found).filter(|(it, found)| it.to_f32() != **found);
            assert_eq!(
                wrong.count(),
                0,
                "{rounding:?} {name}: {:?} and {:?} of {:?}",
                &wanted[..4],
                &found[..4],
                &numbers[..4]
            );
            let before = find(&start).into_iter().map(bf16::from_f32);
            changed += before.zip(&wanted).filter(|(before, now)| before != *now).count();
            all += wanted.len();
        }
        assert_eq!(trained.metrics.weights_changed, Some(changed as f64 / all as f64));
        // A restart goes on from the whole weights.
        let trainer = Trainer::open(small(folder.path(), rounding)).unwrap();
        for ((name, weight), (_, again)) in weights.iter().zip(trainer.model().trained()) {
            assert!(weight.equal(again), "{name}");
        }
        trained.metrics.weights_changed.unwrap()
    });
    assert!(nearest < 0.05 && stochastic > nearest, "{nearest}, {stochastic}");
}
