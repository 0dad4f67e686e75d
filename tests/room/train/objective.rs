//! The loss of prepared turns, and steps over it.

use super::*;

/// A mask selects: NaN at a masked place changes nothing, and a token alone has
/// the loss that an own forward pass gives it.
#[test]
fn a_mask_selects() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let turn = judged(1, 1.0);
    let ids = [turn.prompt_ids.clone().unwrap(), turn.response_ids.clone().unwrap()].concat();
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    for token in 0..3 {
        let mut mask = [false; 3];
        mask[token] = true;
        let gradient = |junk: f32| {
            zero_gradients(model.parameters());
            let measures = gradients(&model, &[prepared(&turn, mask, junk)], &terms(), 64);
            let flat = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
            (measures.policy_loss, Tensor::cat(&flat.collect::<Vec<_>>(), 0))
        };
        let (clean, dirty) = (gradient(0.0), gradient(f32::NAN));
        assert_eq!(clean.0, dirty.0);
        assert!(clean.1.equal(&dirty.1) && clean.1.norm().double_value(&[]) > 0.0);
        zero_gradients(model.parameters());
        let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
        let row = 4 + token as i64 - 1;
        let logits = model.head(&hidden.narrow(0, row, 1));
        let target = Tensor::from_slice(&[ids[row as usize + 1]]);
        let ratio = (oclaw::loss::log_probs(&logits, &target) + 7.0).exp();
        let wanted = -(ratio.minimum(&Tensor::from(1.28_f32)) * 0.5).sum(Kind::Float);
        assert!((wanted.double_value(&[]) - clean.0).abs() < 1e-4);
        wanted.backward();
        let flat = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
        let off = (Tensor::cat(&flat.collect::<Vec<_>>(), 0) - clean.1).abs().max();
        assert!(off.double_value(&[]) < 1e-4, "token {token}: off by {off}");
    }
}

#[test]
fn a_batch_without_trained_tokens_has_no_loss() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let measures = gradients(&model, &[prepared(&judged(1, 1.0), [false; 3], 0.0)], &terms(), 64);
    assert_eq!((measures.loss, measures.entropy), (0.0, 0.0));
    assert!(model.parameters().iter().all(|(_, weight)| !weight.grad().defined()));
}

#[test]
fn several_epochs_keep_the_old_log_probs() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { epochs: 3, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    let trained = train(&mut trainer, batch(1..=2)).unwrap();
    assert!(trained.metrics.approximate_kl.unwrap().abs() > 1e-3);
    assert_eq!(trained.metrics.step, 1);
    assert_eq!(read_record(&trained.policy.unwrap()).unwrap().updates, 3);
}

#[test]
fn hints_pull_towards_the_teacher() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.admission = admission(Estimator::Opd);
    // The teacher is sure of the answer, the model is not.
    let mut trainer = Trainer::open(options).unwrap();
    let turn = advantage::note(finished("s", 1), false, &Method::new(Estimator::Opd));
    let before = response_log_prob(trainer.model(), &turn);
    let trained = train(&mut trainer, vec![turn.clone(), judged(2, 1.0)]).unwrap();
    assert_eq!(trained.metrics.turns, 1);
    assert_eq!(trainer.refused()["no_signal_for_estimator"], 1);
    assert!(trained.metrics.advantage_min.unwrap() > 0.0);
    assert!(response_log_prob(trainer.model(), &turn) > before);
}

#[test]
fn the_servers_log_probs_can_stand_for_the_old_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.admission.old_log_probs = OldLogProbs::Rollout;
    let mut trainer = Trainer::open(options).unwrap();
    let without = Turn { rollout_log_probs: None, ..judged(3, 1.0) };
    let trained = train(&mut trainer, [batch(1..=2), vec![without]].concat()).unwrap();
    // The last token has no log-prob of the server's and no ratio.
    assert_eq!((trained.metrics.turns, trained.metrics.tokens), (2, 4));
    assert_eq!(trained.metrics.importance, Some(1.0));
    assert!(trained.metrics.log_prob_gap.unwrap() > 0.1, "by a forward pass of the trainer");
    assert_eq!(trainer.refused()["no_log_probs"], 1);
}

#[test]
fn a_step_that_is_not_finite_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.terms.entropy_coefficient = f64::NAN;
    let mut trainer = Trainer::open(options).unwrap();
    let before = response_log_prob(trainer.model(), &judged(1, 1.0));
    for number in 1..=2 {
        let trained = train(&mut trainer, batch(number..=number)).unwrap();
        assert_eq!((trained.policy, trained.metrics.skipped_updates), (None, 1));
    }
    assert_eq!(response_log_prob(trainer.model(), &judged(1, 1.0)), before);
    let samples = trainer.collect(&mut VecDeque::from(batch(3..=3)), None);
    let error = trainer.train(samples).unwrap_err();
    assert!(matches!(error, Error::NotFinite { updates: 3 }), "{error}");
    assert!(!folder.path().join("latest").exists());
}

#[test]
fn reinforce_whitens_over_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("tiny-qwen3", folder.path());
    options.admission = admission(Estimator::ReinforcePlusPlus);
    let mut trainer = Trainer::open(options).unwrap();
    let metrics = train(&mut trainer, batch(1..=3)).unwrap().metrics;
    // Six times 1, three times -1: unbiased variance 1.
    assert!(metrics.advantage_mean.unwrap().abs() < 1e-6);
    assert!((metrics.advantage_max.unwrap() - 2.0 / 3.0).abs() < 1e-5);
    assert!((metrics.advantage_min.unwrap() + 4.0 / 3.0).abs() < 1e-5);
}

/// Answers without a token or without a trained one, before, between and after others:
/// the loss counts them, and they go through nothing.
#[test]
fn samples_without_trained_tokens_change_only_the_count() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let empty = || {
        let mut none = prepared(&judged(3, 1.0), [true; 3], 0.0);
        none.sample = Sample {
            prompt_ids: vec![1],
            response_ids: vec![],
            mask: vec![],
            rollout: vec![],
            ..none.sample
        };
        (none.old_log_probs, none.advantages) = (vec![], vec![]);
        none
    };
    let [one, two] = [1, 2].map(|number| prepared(&judged(number, 1.0), [true; 3], 0.0));
    let masked = || prepared(&judged(4, 1.0), [false; 3], f32::NAN);
    let few = [one.clone(), two.clone()];
    let many = [empty(), one, masked(), empty(), two, empty(), masked(), empty()];
    for form in [Form::Ppo, Form::Gspo, Form::Cispo] {
        let policy = Policy { form, drift: Some(0.1), ..terms().policy };
        let terms = Terms { policy, reduction: Reduction::Sample, ..terms() };
        for budget in [1, 64] {
            let run = |batch: &[Prepared]| {
                zero_gradients(model.parameters());
                let measures = gradients(&model, batch, &terms, budget);
                let flat = model.parameters().iter().map(|(_, it)| it.grad().copy().view(-1));
                (measures.loss, Tensor::cat(&flat.collect::<Vec<_>>(), 0))
            };
            // 2 answers of 8.
            let ((some, gradient), (all, with_others)) = (run(&few), run(&many));
            assert!(some != 0.0 && (all * 4.0 - some).abs() < 1e-5, "{form:?}: {some}, {all}");
            let off = (with_others * 4.0 - gradient).abs().max().double_value(&[]);
            assert!(off < 1e-4, "{form:?}: off by {off}");
        }
    }
    let samples = [empty().sample, masked().sample];
    let found = sample_log_probs(&model, &[&samples[0], &samples[1]], 64);
    assert_eq!((found[0].own.len(), found[1].own.len()), (0, 3));
}
