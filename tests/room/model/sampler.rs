//! Sampling against probabilities counted by hand.

use oclaw::model::sampler::top_log_probs;
use oclaw::model::{Error, Sampler, SamplingParams};

/// Logits whose probabilities are 1/2, 1/4, 1/8 and 1/8.
fn quarters() -> Vec<f32> {
    [0.125_f32, 0.5, 0.125, 0.25].iter().map(|share| share.ln() + 3.0).collect()
}

fn draw(params: SamplingParams, count: usize) -> Vec<i32> {
    let mut sampler = Sampler::new(params).unwrap();
    (0..count).map(|_| sampler.sample(&quarters()).unwrap().id).collect()
}

#[test]
fn a_log_prob_is_that_of_the_whole_distribution() {
    let near =
        |found: f32, wanted: f64| assert!((f64::from(found) - wanted).abs() < 1e-6, "{found}");
    // At temperature 1/2 the probabilities are squared: 16, 4, 1 and 1 of 22.
    let params = SamplingParams { temperature: 0.5, top_k: 1, ..Default::default() };
    let sampled = Sampler::new(params).unwrap().sample(&quarters()).unwrap();
    assert_eq!(sampled.id, 1);
    near(sampled.log_prob, (16.0_f64 / 22.0).ln());
    near(sampled.raw_log_prob, 0.5_f64.ln());
    let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
    let sampled = Sampler::new(greedy).unwrap().sample(&quarters()).unwrap();
    assert_eq!(sampled.id, 1);
    near(sampled.log_prob, 0.5_f64.ln());
    let top = top_log_probs(&quarters(), 3, 0.5).unwrap();
    assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 0]);
    near(top[1].1, (4.0_f64 / 22.0).ln());
    assert_eq!(top_log_probs(&quarters(), 9, 1.0).unwrap().len(), 4);
}

#[test]
fn tokens_come_as_often_as_they_should() {
    let all = draw(SamplingParams { seed: 7, ..Default::default() }, 20_000);
    for (id, share) in [(0, 0.125), (1, 0.5), (2, 0.125), (3, 0.25)] {
        let found = all.iter().filter(|&&drawn| drawn == id).count() as f64 / 20_000.0;
        // Five standard deviations of the widest.
        assert!((found - share).abs() < 0.018, "{id}: {found}");
    }
}

#[test]
fn each_filter_keeps_what_it_should() {
    let plain = SamplingParams { seed: 3, ..Default::default() };
    for (params, kept) in [
        (SamplingParams { top_k: 1, ..plain }, vec![1]),
        (SamplingParams { top_k: 2, ..plain }, vec![1, 3]),
        // Equal probabilities at the border: the lower id.
        (SamplingParams { top_k: 3, ..plain }, vec![0, 1, 3]),
        (SamplingParams { top_p: 0.4, ..plain }, vec![1]),
        (SamplingParams { top_p: 0.6, ..plain }, vec![1, 3]),
        (SamplingParams { top_p: 0.8, ..plain }, vec![0, 1, 3]),
        (SamplingParams { top_p: 0.99, ..plain }, vec![0, 1, 2, 3]),
        (SamplingParams { min_p: 0.4, ..plain }, vec![1, 3]),
        (SamplingParams { min_p: 1.0, ..plain }, vec![1]),
        (SamplingParams { top_k: 3, top_p: 0.6, min_p: 0.1, ..plain }, vec![1, 3]),
        // Squared: 16/22 is above a top-p of 0.7.
        (SamplingParams { temperature: 0.5, top_p: 0.7, ..plain }, vec![1]),
    ] {
        let mut drawn = draw(params, 500);
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn, kept, "{params:?}");
    }
}

#[test]
fn the_seed_decides_and_nothing_else() {
    let params = SamplingParams { seed: 11, top_p: 0.95, ..Default::default() };
    assert_eq!(draw(params, 50), draw(params, 50));
    assert_ne!(draw(params, 50), draw(SamplingParams { seed: 12, ..params }, 50));
}

#[test]
fn logits_that_are_no_numbers_are_never_sampled() {
    for (id, bad) in [(2, f32::NAN), (1, f32::INFINITY), (0, f32::NEG_INFINITY)] {
        let mut logits = quarters();
        logits[id] = bad;
        let params = SamplingParams { temperature: 0.0, ..Default::default() };
        for params in [params, SamplingParams::default()] {
            let error = Sampler::new(params).unwrap().sample(&logits).unwrap_err();
            assert!(matches!(error, Error::NotFinite { id: found, .. } if found == id), "{error}");
        }
    }
    assert!(Sampler::new(SamplingParams::default()).unwrap().sample(&[]).is_err());
}

#[test]
fn sampling_settings_that_mean_nothing_are_refused() {
    let plain = SamplingParams::default();
    for (params, name) in [
        (SamplingParams { temperature: -1.0, ..plain }, "temperature"),
        (SamplingParams { temperature: f32::NAN, ..plain }, "temperature"),
        (SamplingParams { top_p: 0.0, ..plain }, "top_p"),
        (SamplingParams { top_p: 1.5, ..plain }, "top_p"),
        (SamplingParams { min_p: -0.1, ..plain }, "min_p"),
    ] {
        let message = Sampler::new(params).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
}
