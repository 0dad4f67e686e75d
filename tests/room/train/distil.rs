//! Top-k distillation.

use super::*;

/// A row that a hint teaches by its top-k ids, without a reward.
fn taught(number: u32) -> Turn {
    let turn = Turn { score: None, votes: None, ..finished("s", number) };
    advantage::note(turn, false, &Method::new(Estimator::Hybrid))
}

fn hybrid(folder: &Path) -> Options {
    let method = Method { distill_clip: Some(1.0), ..Method::new(Estimator::Hybrid) };
    let admission = Admission { method, ..admission(Estimator::Hybrid) };
    Options { admission, ..options("tiny-qwen3", folder) }
}

/// Through the packed model and by plain autograd over all logits.
#[test]
fn the_gradient_of_top_k_distillation() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let turn = judged(1, 1.0);
    let ids = [turn.prompt_ids.clone().unwrap(), turn.response_ids.clone().unwrap()].concat();
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let distilled = Distilled {
        k: 2,
        ids: vec![3, 9, 4, 8, 5, 7],
        inside: vec![true, true, true, false, false, false],
        advantages: vec![0.5, -0.25, 0.75, 0.0, 0.0, 0.0],
        old_log_probs: vec![-7.0; 6],
        teacher: vec![-7.0; 6],
        gaps: vec![0.0; 3],
        overlaps: vec![0.0; 3],
        unusable: vec![false; 3],
    };
    // The second of three tokens is masked, NaN and all.
    let mut batch = prepared(&turn, [true, false, true], f32::NAN);
    let mut dirty = distilled.clone();
    dirty.advantages[2..4].fill(f32::NAN);
    dirty.old_log_probs[2..4].fill(f32::NAN);
    batch.distilled = Some(dirty);
    // Another sample, without a hint and so without the term.
    let other = prepared(&judged(2, 1.0), [true; 3], 0.0);
    let flat = || {
        let all = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
        Tensor::cat(&all.collect::<Vec<_>>(), 0)
    };
    let run = |batch: &[Prepared]| {
        zero_gradients(model.parameters());
        let measures = gradients(&model, batch, &terms(), 64);
        (measures, flat())
    };
    let without: Vec<_> =
        [&batch, &other].map(|prepared| Prepared { distilled: None, ..prepared.clone() }).into();
    let (plain, plain_gradient) = run(&without);
    assert_eq!(plain.distill_loss, None);
    let (found, gradient) = run(&[batch, other]);
    assert_eq!(found.policy_loss, plain.policy_loss);

    zero_gradients(model.parameters());
    let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
    let log_probs = model.head(&hidden.narrow(0, 3, 1)).log_softmax(-1, Kind::Float);
    let ratio = (log_probs.index_select(1, &Tensor::from_slice(&[3_i64, 9])) + 7.0).exp();
    let worth = Tensor::from_slice(&[0.5_f32, -0.25]);
    let clipped = -(ratio.clamp(0.8, 1.28) * &worth);
    let term = (-(&ratio * &worth)).maximum(&clipped);
    let limited = term.minimum(&(&worth * -3.0)).where_self(&worth.lt(0.0), &term);
    // Half of the sample's tokens, half of the batch; the third token's subset
    // is empty and counts.
    let wanted = limited.sum(Kind::Float) * 0.25;
    assert!((wanted.double_value(&[]) - found.distill_loss.unwrap()).abs() < 1e-5);
    assert!((found.loss - found.policy_loss - found.distill_loss.unwrap()).abs() < 1e-6);
    wanted.backward();
    let off = (flat() + plain_gradient - gradient).abs().max().double_value(&[]);
    assert!(off < 1e-4, "off by {off}");
}

#[test]
fn hybrid_pulls_towards_the_ids_that_a_hint_favours() {
    for (selection, subset) in [
        (HintSelection::Sequence, SubsetIds::Student),
        (HintSelection::Token, SubsetIds::Teacher),
        (HintSelection::Shortest, SubsetIds::Overlap),
    ] {
        for old_log_probs in [OldLogProbs::Recompute, OldLogProbs::Rollout] {
            let folder = tempfile::tempdir().unwrap();
            let mut options = hybrid(folder.path());
            options.admission.distillation =
                Distillation { selection, subset, ..Distillation::default() };
            options.admission.old_log_probs = old_log_probs;
            let mut trainer = Trainer::open(options).unwrap();
            let turn = Turn { rollout_log_probs: Some(vec![Some(-7.0); 3]), ..taught(1) };
            let before = response_log_prob(trainer.model(), &turn);
            let trained = train(&mut trainer, vec![turn.clone(), judged(2, 1.0)]).unwrap();
            let metrics = trained.metrics;
            assert_eq!((metrics.turns, metrics.unusable), (2, 0));
            assert_eq!((metrics.subset_size, metrics.overlap), (Some(2.0), Some(2.0)));
            // Teacher and model are further apart than C.
            assert!((metrics.distill_gap.unwrap() - 1.0).abs() < 1e-6);
            // w sums to 1 and d is 1; half of the batch.
            assert!((metrics.distill_loss.unwrap() + 0.5).abs() < 1e-5);
            assert!(response_log_prob(trainer.model(), &turn) > before);
        }
    }
}

/// Deliberate difference: the reference distils a turn without a hint towards
/// the teacher without one.
#[test]
fn hybrid_gives_a_turn_without_a_hint_its_reward_only() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(hybrid(folder.path())).unwrap();
    let no_topk = Turn { teacher_topk_ids: Some(vec![None, None]), ..taught(3) };
    let trained = train(&mut trainer, [batch(1..=2), vec![no_topk]].concat()).unwrap();
    assert_eq!((trained.metrics.turns, trained.metrics.distill_loss), (2, None));
    assert_eq!((trained.metrics.subset_size, trained.metrics.overlap), (None, None));
    assert_eq!(trainer.refused()["no_topk"], 1);
}

#[test]
fn a_value_that_is_no_number_teaches_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(hybrid(folder.path())).unwrap();
    let odd = vec![Some(vec![-0.1, f32::NAN, -0.3, -0.4, -0.5, -0.6]), None];
    let turn = Turn { teacher_at_student: Some(odd), ..taught(1) };
    let metrics = train(&mut trainer, vec![turn]).unwrap().metrics;
    assert_eq!((metrics.unusable, metrics.subset_size), (1, Some(4.0 / 3.0)));
    assert!((metrics.distill_loss.unwrap() + 2.0 / 3.0).abs() < 1e-5);
}

#[test]
fn broken_top_k_columns_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(hybrid(folder.path())).unwrap();
    let turns = [
        Turn { student_topk_ids: Some(vec![5, 6, 7]), ..taught(1) },
        Turn { student_topk_ids: Some(vec![5, 6, 7, 7, 2, 3]), ..taught(2) },
        Turn { teacher_topk_ids: Some(vec![Some(vec![5, 5, 7, 8, 2, 3]), None]), ..taught(3) },
        Turn { teacher_topk_ids: Some(vec![Some(vec![5, 6, 7, 8, 2, 1024]), None]), ..taught(4) },
        Turn { teacher_at_student: Some(vec![Some(vec![-0.1; 5]), None]), ..taught(5) },
        Turn { student_topk_ids: Some(vec![5, 6, 7, -8, 2, 3]), ..taught(6) },
        Turn { teacher_at_student: Some(vec![Some(vec![0.5; 6]), None]), ..taught(7) },
    ];
    assert_eq!(train(&mut trainer, turns.to_vec()), None);
    let problems: Vec<_> = trainer.faults().iter().map(|fault| fault.problem.as_str()).collect();
    let wanted = [
        "student_topk_ids has 3 values for 3 response ids times k = 2",
        "token id 1024 is not among the model's 1024: another tokenizer",
        "teacher_at_student has 5 values for 3 response ids times k = 2",
        "token id -8 is not among the model's 1024: another tokenizer",
        "teacher_at_student is 0.5 for hint 0, above 0",
        "the student's top-k has an id twice at token 1",
        "candidate 0's top-k has an id twice at token 0",
    ];
    assert_eq!(problems, wanted);
}

fn topk_kl(folder: &Path) -> Options {
    let terms = Terms { teaching: Teaching::Kl { weight: 1.0 }, ..terms() };
    Options { admission: admission(Estimator::TopkKl), terms, ..options("tiny-qwen3", folder) }
}

/// Through the packed model, at two temperatures, and by plain autograd over all logits.
#[test]
fn the_gradient_of_the_kl_from_the_teacher() {
    let options = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &options).unwrap();
    let turn = judged(1, 1.0);
    let ids = [turn.prompt_ids.clone().unwrap(), turn.response_ids.clone().unwrap()].concat();
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let mut one = prepared(&turn, [true, false, true], f32::NAN);
    one.advantages = vec![0.5, f32::NAN, 0.0];
    (one.sample.temperature, one.sample.teacher_temperature) = (0.7, 2.0);
    one.distilled = Some(Distilled {
        k: 2,
        ids: vec![3, 9, 4, 8, 5, 7],
        inside: vec![true, true, true, true, false, false],
        advantages: vec![f32::NAN; 6],
        old_log_probs: vec![f32::NAN; 6],
        // The second token is masked.
        teacher: vec![-1.0, -2.0, f32::NAN, f32::NAN, 0.0, 0.0],
        gaps: vec![0.0; 3],
        overlaps: vec![0.0; 3],
        unusable: vec![false, false, true],
    });
    let terms = Terms {
        teaching: Teaching::Kl { weight: 0.5 },
        importance: Importance::Off,
        entropy_coefficient: 0.1,
        ..terms()
    };
    let flat = || {
        let all = model.parameters().iter().map(|(_, weight)| weight.grad().copy().view(-1));
        Tensor::cat(&all.collect::<Vec<_>>(), 0)
    };
    zero_gradients(model.parameters());
    let found = gradients(&model, std::slice::from_ref(&one), &terms, 64);
    let gradient = flat();

    zero_gradients(model.parameters());
    let hidden = model.hidden(&Tensor::from_slice(&ids), &[ids.len() as i64]);
    // The rows before the first and the third token.
    let logits = model.head(&hidden.index_select(0, &Tensor::from_slice(&[3_i64, 5])));
    let probs = (logits.get(0) / 2.0).softmax(-1, Kind::Float);
    let (first, second) = (probs.get(3), probs.get(9));
    let rest = -(&first + &second) + 1.0;
    // 1 - exp(-1) - exp(-2).
    let kl = &first * (first.log() + 1.0)
        + &second * (second.log() + 2.0)
        + &rest * (rest.log() - 0.496_785_3_f64.ln());
    let tempered = &logits / 0.7;
    let own = [tempered.get(0), tempered.get(1)].map(|row| row.log_softmax(-1, Kind::Float));
    let entropy = loss_entropy(&own[0]) + loss_entropy(&own[1]);
    // Old log-probs of -7, an advantage of 0.5 and one of 0, bounds 0.8 and 1.28.
    let ratio = (own[0].get(ids[4]) + 7.0).exp();
    let policy = -(ratio.clamp_max(1.28) * 0.5);
    let wanted = (&kl * 0.5 + &policy - entropy * 0.1) / 2.0;
    let kl = kl.double_value(&[]) * 0.25;
    assert!(kl > 0.1 && (found.distill_loss.unwrap() - kl).abs() < 1e-6, "{found:?}, {kl}");
    assert_eq!(found.distill_clip_fraction, None);
    assert!((found.loss - wanted.double_value(&[])).abs() < 1e-5, "{found:?}");
    wanted.backward();
    let (size, off) = (gradient.abs().max(), (flat() - gradient).abs().max());
    let (size, off) = (size.double_value(&[]), off.double_value(&[]));
    assert!(size > 0.0 && off < 1e-5 * (1.0 + size), "off by {off} of {size}");
}

fn loss_entropy(log_probs: &Tensor) -> Tensor {
    -(log_probs.exp() * log_probs).sum(Kind::Float)
}

/// The first usable hint teaches, whatever the others say; rewards say nothing.
#[test]
fn topk_kl_draws_near_the_teacher() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(topk_kl(folder.path())).unwrap();
    let likely = [0.6_f32.ln(), 0.3_f32.ln()].repeat(3);
    let of = |number: u32, own: Vec<f32>| Turn {
        teacher_topk_log_probs: Some(vec![None, Some(own), Some(vec![-3.0; 6])]),
        teacher_topk_ids: Some(vec![None, Some(vec![5, 6, 7, 8, 2, 3]), Some([1, 2].repeat(3))]),
        teacher_at_student: None,
        student_topk_ids: Some([900, 901].repeat(3)),
        hints: Some(["a", "b", "c"].map(str::to_owned).to_vec()),
        teacher_log_probs: Some(vec![None, Some(vec![-0.1; 3]), Some(vec![-0.1; 3])]),
        ..taught(number)
    };
    let first = train(&mut trainer, vec![of(1, likely.clone()), judged(9, 1.0)]).unwrap().metrics;
    assert_eq!((first.turns, first.policy_loss), (1, Some(0.0)));
    assert_eq!(trainer.refused()["no_signal_for_estimator"], 1);
    assert_eq!((first.subset_size, first.overlap), (Some(2.0), Some(0.0)));
    assert_eq!((first.advantage_std, first.advantage_zero), (None, None));
    let second = train(&mut trainer, vec![of(2, likely.clone())]).unwrap().metrics;
    assert!(second.distill_loss < first.distill_loss, "{first:?} {second:?}");
    // A value that is no number: that token has no term, and counts.
    let mut odd = likely.clone();
    odd[0] = f32::NEG_INFINITY;
    let third = train(&mut trainer, vec![of(3, odd)]).unwrap().metrics;
    assert_eq!((third.unusable, third.subset_size), (1, Some(4.0 / 3.0)));
    assert!(third.distill_loss.unwrap() < 0.8 * second.distill_loss.unwrap(), "{third:?}");
    let token_level = Turn { topk: None, ..of(4, likely) };
    assert_eq!(train(&mut trainer, vec![token_level]), None);
    assert_eq!(trainer.refused()["no_topk"], 1);
}
