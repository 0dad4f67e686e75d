//! The forms of the policy term, against the plain way: all logits at once, and
//! autograd through them.

use oclaw::loss::{self, Surrogate};

use super::*;

const CLIP: Clip = Clip { low: 0.2, high: 0.28, dual: Some(3.0) };

fn trainable() -> Model {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    Model::load(&models().join("tiny-qwen3"), &options).unwrap()
}

/// An answer of some tokens, with advantages of both signs and old log-probs off by
/// `drift` of the model's.
fn answer(model: &Model, number: u32, tokens: i32, drift: f32) -> Prepared {
    let turn = judged(number, 1.0);
    let sample = admit(&turn, 0, &admission(Estimator::Combine)).unwrap();
    let ids: Vec<i32> = (0..tokens).map(|token| (token * 37 + 11) % 1000).collect();
    let sample = Sample {
        mask: (0..tokens).map(|token| token % 5 != 3).collect(),
        rollout: vec![None; ids.len()],
        response_ids: ids,
        ..sample
    };
    let own = &sample_log_probs(model, &[&sample], 64)[0].own;
    Prepared {
        // Of alternating size, so that tokens and answers have other ratios.
        old_log_probs: own
            .iter()
            .enumerate()
            .map(|(at, value)| value + drift * (at % 3) as f32)
            .collect(),
        advantages: (0..tokens).map(|token| [1.0, -0.5, 0.25][token as usize % 3]).collect(),
        reference_log_probs: None,
        distilled: None,
        sample,
    }
}

fn flat_gradient(model: &Model) -> Tensor {
    let flat = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
    Tensor::cat(&flat.collect::<Vec<_>>(), 0)
}

/// Returns log-probs (with their graph), old ones and advantages of the trained
/// tokens, and how many of them each answer has.
fn plain(model: &Model, batch: &[Prepared]) -> ([Tensor; 3], Vec<i64>) {
    let (mut own, mut old, mut advantages, mut lengths) = (vec![], vec![], vec![], vec![]);
    for prepared in batch {
        let sample = &prepared.sample;
        let whole = sample.prompt_ids.iter().chain(&sample.response_ids);
        let ids: Vec<i64> = whole.map(|id| i64::from(*id)).collect();
        let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
        let trained: Vec<usize> = sample.trained().collect();
        let first = sample.prompt_ids.len();
        let rows: Vec<i64> = trained.iter().map(|at| (first + at - 1) as i64).collect();
        let targets: Vec<i64> = trained.iter().map(|at| ids[first + at]).collect();
        let logits = model.head(&hidden.index_select(0, &Tensor::from_slice(&rows)));
        own.push(loss::log_probs(&logits, &Tensor::from_slice(&targets)));
        old.extend(trained.iter().map(|at| prepared.old_log_probs[*at]));
        advantages.extend(trained.iter().map(|at| prepared.advantages[*at]));
        lengths.push(trained.len() as i64);
    }
    let columns = [Tensor::cat(&own, 0), Tensor::from_slice(&old), Tensor::from_slice(&advantages)];
    (columns, lengths)
}

fn check(form: Form, drift: Option<f64>, batch: &[Prepared], model: &Model) -> (Measures, f64) {
    let ([own, old, advantages], lengths) = plain(model, batch);
    let ratio = loss::log_ratio(&own, &old);
    let Surrogate { loss: losses, clipped } = match form {
        Form::Ppo => loss::ppo_clip(&ratio, &advantages, &CLIP),
        Form::Gspo => loss::ppo_clip(&loss::sequence_mean(&ratio, &lengths), &advantages, &CLIP),
        Form::Cispo => loss::cispo(&own, &old, &advantages, &CLIP),
    };
    let keep = match drift {
        Some(drift) => loss::opsm_keep(&ratio, &advantages, &lengths, drift),
        None => ratio.ones_like(),
    };
    let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
    let weights = Tensor::from_slice(&loss::weights(&counts, Reduction::Sample));
    let wanted = loss::reduce(&(losses * &keep), &weights);
    zero_gradients(model.parameters());
    wanted.backward();
    let gradient = flat_gradient(model);

    let policy = Policy { form, clip: CLIP, drift };
    let terms = Terms { policy, importance: Importance::Off, ..terms() };
    // Each answer alone, then all in one pass.
    let mut found = Measures::default();
    for budget in [1, 1 << 20] {
        zero_gradients(model.parameters());
        found = gradients(model, batch, &terms, budget);
        let what = format!("{form:?} {drift:?} {budget}");
        let off = found.policy_loss - wanted.double_value(&[]);
        assert!(off.abs() < 1e-5, "{what}: loss off by {off}");
        let size = gradient.abs().max().double_value(&[]);
        let off = (flat_gradient(model) - &gradient).abs().max().double_value(&[]);
        assert!(size > 0.0 && off < 1e-4 * size, "{what}: gradient off by {off} of {size}");
        let clipped = loss::reduce(&clipped, &weights).double_value(&[]);
        assert!((found.clip_fraction - clipped).abs() < 1e-5, "{what}");
    }
    (found, loss::reduce(&(1.0 - keep), &weights).double_value(&[]))
}

#[test]
fn every_form_has_the_gradient_of_the_plain_way() {
    let model = trainable();
    // Ratios of the answers: about exp(0.3), clipped above, and exp(-0.3), below.
    let batch = [answer(&model, 1, 11, -0.3), answer(&model, 2, 7, 0.3)];
    for form in [Form::Ppo, Form::Gspo, Form::Cispo] {
        let (found, _) = check(form, None, &batch, &model);
        assert!(found.clip_fraction > 0.0 && found.clip_fraction < 1.0, "{form:?}");
        assert_eq!(found.dropped, None);
        let (found, dropped) = check(form, Some(0.1), &batch, &model);
        assert!(dropped > 0.0 && dropped < 0.5, "{form:?}: the second answer's blamed tokens");
        assert!((found.dropped.unwrap() - dropped).abs() < 1e-5, "{form:?}");
    }
}

/// More tokens than logits are held of at once: the mean is over all of them.
#[test]
fn a_long_answer_has_one_ratio() {
    let model = trainable();
    let batch = [answer(&model, 1, 2800, -0.1), answer(&model, 2, 9, 0.3)];
    assert!(batch[0].sample.trained().count() > 2048);
    check(Form::Gspo, Some(0.1), &batch, &model);
}

/// By hand: lc - lo = ln 1.5, A = -1: the ratio 1.5 weights k2 of lc - lref = 0.4.
#[test]
fn the_unbiased_kl_is_weighted_by_the_ratio() {
    let model = trainable();
    let turn = judged(1, 1.0);
    let mut one = prepared(&turn, [true, false, false], 0.0);
    let own = sample_log_probs(&model, &[&one.sample], 64)[0].own[0];
    one.old_log_probs[0] = own - 1.5_f32.ln();
    one.reference_log_probs = Some(vec![own - 0.4, 0.0, 0.0]);
    for (kl_unbiased, wanted) in [(false, 0.08), (true, 0.12)] {
        zero_gradients(model.parameters());
        let terms = Terms { kl: KlKind::K2, kl_coefficient: 1.0, kl_unbiased, ..terms() };
        let found = gradients(&model, std::slice::from_ref(&one), &terms, 64);
        assert!((found.reference_kl.unwrap() - wanted).abs() < 1e-5, "{found:?}");
    }
}

/// 4, 3, 2, 1 quarters of the rate; a restart does not begin anew.
#[test]
fn the_rate_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let schedule = Schedule { warmup: 0, shape: Shape::Linear, total: 4 };
    let mut rates = Vec::new();
    for step in 0..4 {
        let options = Options { schedule, ..options("tiny-qwen3", folder.path()) };
        let mut trainer = Trainer::open(options).unwrap();
        let trained = train(&mut trainer, batch(2 * step + 1..=2 * step + 2)).unwrap();
        rates.push(trained.metrics.learning_rate);
    }
    assert_eq!(rates, [1.0, 0.75, 0.5, 0.25].map(|share| 1e-3 * share));
}

#[test]
fn parts_of_a_batch_have_updates_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { parts: 2, epochs: 2, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    let trained = train(&mut trainer, batch(1..=3)).unwrap();
    assert_eq!((trained.metrics.turns, trained.metrics.step), (3, 1));
    assert_eq!(read_record(&trained.policy.unwrap()).unwrap().updates, 4);
}

/// An answer of three tokens of which lc - lo is known.
fn ahead(model: &Model, ratios: [f32; 3], advantages: [f32; 3]) -> Prepared {
    let mut one = prepared(&judged(1, 1.0), [true; 3], 0.0);
    let own = &sample_log_probs(model, &[&one.sample], 64)[0].own;
    one.old_log_probs = own.iter().zip(ratios).map(|(own, ratio)| own - ratio).collect();
    one.advantages = advantages.to_vec();
    one
}

fn measured(one: &Prepared, form: Form, drift: Option<f64>, model: &Model) -> (Measures, f64) {
    zero_gradients(model.parameters());
    let clip = Clip { dual: None, ..CLIP };
    let policy = Policy { form, clip, drift };
    let terms = Terms { policy, importance: Importance::Off, ..terms() };
    let found = gradients(model, std::slice::from_ref(one), &terms, 64);
    (found, flat_gradient(model).norm().double_value(&[]))
}

/// By hand: the mean of lo - lc is 0.3. Blamed are the first and the last token.
#[test]
fn opsm_drops_what_is_blamed_in_an_answer_that_drifted() {
    let model = trainable();
    let one = ahead(&model, [-0.6, 0.0, -0.3], [-1.0, 1.0, -0.5]);
    let (found, _) = measured(&one, Form::Ppo, Some(0.2), &model);
    assert!((found.policy_loss + 1.0 / 3.0).abs() < 1e-5, "{found:?}");
    assert!((found.dropped.unwrap() - 2.0 / 3.0).abs() < 1e-6, "{found:?}");
    // Kept, both are clipped at 0.8: (0.8 - 1 + 0.4) / 3.
    let (found, _) = measured(&one, Form::Ppo, Some(0.4), &model);
    assert!((found.policy_loss - 0.2 / 3.0).abs() < 1e-5, "{found:?}");
    assert_eq!(found.dropped, Some(0.0));
    let blamed = ahead(&model, [-0.6, 0.0, -0.3], [-1.0, -1.0, -0.5]);
    let (found, gradient) = measured(&blamed, Form::Ppo, Some(0.2), &model);
    assert_eq!((found.policy_loss, gradient), (0.0, 0.0));
}

/// By hand: the mean of lc - lo is 0.4, a ratio of 1.4918, above 1.28; of the tokens'
/// own ratios only the first is.
#[test]
fn gspo_clips_the_whole_answer() {
    let model = trainable();
    let praised = ahead(&model, [0.9, 0.1, 0.2], [1.0; 3]);
    let (found, gradient) = measured(&praised, Form::Gspo, None, &model);
    assert!((found.policy_loss + 1.28).abs() < 1e-5, "{found:?}");
    assert!((found.clip_fraction - 1.0).abs() < 1e-6, "{found:?}");
    assert_eq!(gradient, 0.0);
    let blamed = ahead(&model, [0.9, 0.1, 0.2], [-1.0; 3]);
    let (found, gradient) = measured(&blamed, Form::Gspo, None, &model);
    assert!((found.policy_loss - 1.491_824_7).abs() < 1e-5, "{found:?}");
    assert!(found.clip_fraction == 0.0 && gradient > 0.0, "{found:?}");
    // PPO on the same: -(1.28 + 1.1052 + 1.2214) / 3, one of three clipped.
    let (found, _) = measured(&praised, Form::Ppo, None, &model);
    assert!((found.policy_loss + 1.202_191_1).abs() < 1e-5, "{found:?}");
    assert!((found.clip_fraction - 1.0 / 3.0).abs() < 1e-6, "{found:?}");
}
