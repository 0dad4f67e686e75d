//! The gradient of every loss against central differences, in double precision.

use super::*;

/// Half the distance of the two points. The cut-off terms are of its square, 1e-12,
/// and the rounding of the values weighs 1e-16 / 1e-6.
const STEP: f64 = 1e-6;

/// What a derivative may be off, of 1 + its size.
const TOLERANCE: f64 = 1e-7;

const AT: [f64; 4] = [-1.0, -0.5, -2.5, -0.7];

fn doubles(values: &[f64]) -> Tensor {
    Tensor::from_slice(values)
}

fn old() -> Tensor {
    doubles(&[-1.1, -0.55, -2.0, -1.9])
}

fn advantages() -> Tensor {
    doubles(&[1.0, -0.5, -2.0, 0.75])
}

/// Compares the derivatives of the sum of `function` at a point away from kinks.
fn check(name: &str, at: &[f64], function: impl Fn(&Tensor) -> Tensor) {
    let point = doubles(at).set_requires_grad(true);
    function(&point).sum(Kind::Double).backward();
    let gradient: Vec<f64> = Vec::try_from(point.grad()).unwrap();
    assert!(gradient.iter().any(|slope| *slope != 0.0), "{name}: flat");
    for (index, found) in gradient.iter().enumerate() {
        let value = |by: f64| {
            let mut moved = at.to_vec();
            moved[index] += by;
            let values = function(&doubles(&moved));
            assert_eq!(values.kind(), Kind::Double, "{name}");
            values.sum(Kind::Double).double_value(&[])
        };
        let wanted = (value(STEP) - value(-STEP)) / (2.0 * STEP);
        let off = (found - wanted).abs();
        assert!(off < TOLERANCE * (1.0 + wanted.abs()), "{name}[{index}]: {found}, {wanted}");
    }
}

#[test]
fn of_log_probs_and_entropy() {
    let ids = Tensor::from_slice(&[1_i64, 0]);
    check("log_probs", &AT, |x| loss::log_probs(&x.view([2, 2]), &ids));
    check("entropy", &AT, |x| loss::entropy(&x.view([2, 2])));
}

#[test]
fn of_ppo_and_gspo() {
    for clip in [CLIP, Clip { dual: Some(1.5), ..CLIP }] {
        check("ppo_clip", &AT, |x| {
            loss::ppo_clip(&loss::log_ratio(x, &old()), &advantages(), &clip).loss
        });
        check("gspo", &AT, |x| {
            let ratio = loss::sequence_mean(&loss::log_ratio(x, &old()), &[2, 2]);
            loss::ppo_clip(&ratio, &advantages(), &clip).loss
        });
    }
}

/// The ratio is held: old log-probs that move along keep it as it is, and the loss is
/// then a line whose slope must be found.
#[test]
fn of_cispo() {
    let ahead = doubles(&AT) - old();
    check("cispo", &AT, |x| loss::cispo(x, &(x.detach() - &ahead), &advantages(), &CLIP).loss);
}

/// What is dropped is a constant 0, and the rest is PPO's.
#[test]
fn of_ppo_with_tokens_dropped() {
    let (at, old) = ([-1.0, -0.9, -0.7, -0.6], doubles(&[-0.6, -0.8, -0.75, -0.55]));
    let advantages = doubles(&[-1.0, 0.5, -2.0, 1.5]);
    let loss = |x: &Tensor| {
        let ratio = loss::log_ratio(x, &old);
        // The first answer drifted by a mean of 0.25.
        let keep = loss::opsm_keep(&ratio, &advantages, &[2, 2], 0.2);
        loss::ppo_clip(&ratio, &advantages, &CLIP).loss * keep
    };
    check("opsm", &at, loss);
    let point = doubles(&at).set_requires_grad(true);
    loss(&point).sum(Kind::Double).backward();
    let slopes: Vec<f64> = Vec::try_from(point.grad()).unwrap();
    assert!(slopes[0] == 0.0 && slopes[1..].iter().all(|slope| *slope != 0.0), "{slopes:?}");
}

#[test]
fn of_the_kl_to_a_reference() {
    for kind in [KlKind::K1, KlKind::K2, KlKind::K3, KlKind::LowVar] {
        check("kl", &AT, |x| loss::approximate_kl(kind, x, &old(), None));
        check("unbiased kl", &AT, |x| {
            let ratio = loss::log_ratio(x, &advantages()).exp();
            loss::approximate_kl(kind, x, &old(), Some(&ratio))
        });
    }
}

#[test]
fn of_both_kinds_of_top_k_distillation() {
    let teacher = doubles(&[-0.9, -1.5, -1.2, -1.6]).view([2, 2]);
    check("topk_kl", &AT, |x| {
        let student = x.view([2, 2]).log_softmax(-1, Kind::Double) - 0.2;
        let terms = loss::topk_kl(&student, &teacher);
        terms.kl - terms.entropy * 0.5
    });
    // The last id is no part of the subset.
    let inside = Tensor::from_slice(&[true, true, true, false]).view([2, 2]);
    for clip in [CLIP, Clip { dual: Some(1.5), ..CLIP }] {
        check("topk_surrogate", &AT, |x| {
            let ratio = loss::log_ratio(&x.view([2, 2]), &old().view([2, 2]));
            loss::topk_surrogate(&ratio, &advantages().view([2, 2]), &inside, &clip).loss
        });
    }
}

#[test]
fn of_what_puts_tokens_together() {
    check("whiten", &AT, |x| loss::whiten(x) * advantages());
    let weights = doubles(&[0.5, 0.25, 0.125, 0.125]);
    check("reduce", &AT, |x| loss::reduce(&x.exp(), &weights));
}
