//! The losses by hand: where the recorded cases do not bite, and where numbers
//! run away.

mod differences;

use oclaw::loss::{self, Clip, DistillWeights, HintSelection, KlKind, Reduction, SubsetIds};
use tch::{Kind, Tensor};

const CLIP: Clip = Clip { low: 0.2, high: 0.28, dual: None };

fn vector(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

fn leaf(values: &[f32]) -> Tensor {
    vector(values).set_requires_grad(true)
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float)).unwrap()
}

#[track_caller]
fn close(found: &Tensor, wanted: &[f32]) {
    let found = floats(found);
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(wanted) {
        assert!((found - wanted).abs() < 1e-5 * (1.0 + wanted.abs()), "{found} is not {wanted}");
    }
}

#[test]
fn ratio_one_gives_minus_the_advantage() {
    let log_probs = leaf(&[-1.0, -2.0, -3.0]);
    let ratio = loss::log_ratio(&log_probs, &vector(&[-1.0, -2.0, -3.0]));
    let found = loss::ppo_clip(&ratio, &vector(&[1.0, -0.5, 0.0]), &CLIP);
    close(&found.loss, &[-1.0, 0.5, 0.0]);
    found.loss.sum(Kind::Float).backward();
    // More of what was good: the log-prob of a positive advantage must rise.
    close(&log_probs.grad(), &[-1.0, 0.5, 0.0]);
}

#[test]
fn the_clip_below_inside_and_above() {
    let ratios: Vec<f32> = [0.5_f32, 0.9, 1.5].iter().map(|ratio| ratio.ln()).collect();
    let good = loss::ppo_clip(&vector(&ratios), &vector(&[1.0; 3]), &CLIP);
    close(&good.loss, &[-0.5, -0.9, -1.28]);
    close(&good.clipped, &[0.0, 0.0, 1.0]);
    let bad = loss::ppo_clip(&vector(&ratios), &vector(&[-1.0; 3]), &CLIP);
    close(&bad.loss, &[0.8, 0.9, 1.5]);
    close(&bad.clipped, &[1.0, 0.0, 0.0]);
    let dual = Clip { dual: Some(1.2), ..CLIP };
    close(&loss::ppo_clip(&vector(&ratios), &vector(&[-1.0; 3]), &dual).loss, &[0.8, 0.9, 1.2]);
}

/// Old log-prob -1000 against new -1, and the reverse.
#[test]
fn a_ratio_out_of_bounds_stays_finite() {
    for (new, old) in [(-1.0, -1000.0), (-1000.0, -1.0), (-1.0, -1.0)] {
        for advantage in [0.0, 1.0, -1.0] {
            let log_probs = leaf(&[new]);
            let ratio = loss::log_ratio(&log_probs, &vector(&[old]));
            let found = loss::ppo_clip(&ratio, &vector(&[advantage]), &CLIP);
            found.loss.sum(Kind::Float).backward();
            let (value, gradient) = (floats(&found.loss)[0], floats(&log_probs.grad())[0]);
            assert!(value.is_finite() && gradient.is_finite(), "{new} {old} {advantage}");
            if new != old {
                assert_eq!(gradient, 0.0, "no gradient beyond the limit");
            }
        }
    }
    let visible = loss::log_ratio(&vector(&[f32::NAN]), &vector(&[-1.0]));
    assert!(floats(&visible)[0].is_nan());
}

#[test]
fn gspo_clips_by_the_sequence() {
    // Means of the log-ratios: 0.5 (ratio 1.6487) and 0.1 (1.1052).
    let log_probs = leaf(&[0.9, 0.1, 0.2, 0.0]);
    let ratio = loss::log_ratio(&log_probs, &vector(&[0.0; 4]));
    let ratio = loss::sequence_mean(&ratio, &[2, 2]);
    close(&ratio, &[0.5, 0.5, 0.1, 0.1]);
    let found = loss::ppo_clip(&ratio, &vector(&[1.0; 4]), &CLIP);
    close(&found.loss, &[-1.28, -1.28, -1.105_170_9, -1.105_170_9]);
    close(&found.clipped, &[1.0, 1.0, 0.0, 0.0]);
    found.loss.sum(Kind::Float).backward();
    // Two tokens, each with half of the ratio in its mean.
    close(&log_probs.grad(), &[0.0, 0.0, -1.105_170_9, -1.105_170_9]);
}

#[test]
fn opsm_drops_bad_tokens_of_sequences_that_drifted() {
    // Means of lo - lc: 0.3, above 0.2; then 0.1, below.
    let ratio = vector(&[-0.6, 0.0, -0.2, 0.0]);
    let advantages = vector(&[-1.0, 1.0, -1.0, 1.0]);
    let keep = loss::opsm_keep(&ratio, &advantages, &[2, 2], 0.2);
    assert_eq!(floats(&keep), [0.0, 1.0, 1.0, 1.0]);
    // At the bound itself nothing is dropped.
    let edge = loss::opsm_keep(&vector(&[-0.5, 0.0]), &vector(&[-1.0; 2]), &[2], 0.25);
    assert_eq!(floats(&edge), [1.0, 1.0]);
}

#[test]
fn cispo_weighs_the_log_prob() {
    let log_probs = leaf(&[-1.0, -1.0, -1.0]);
    // Ratios 1.5, 1, 0.5.
    let old = vector(&[-1.405_465_1, -1.0, -0.306_852_8]);
    let found = loss::cispo(&log_probs, &old, &vector(&[1.0, 1.0, -1.0]), &CLIP);
    close(&found.loss, &[1.28, 1.0, -0.8]);
    close(&found.clipped, &[1.0, 0.0, 1.0]);
    found.loss.sum(Kind::Float).backward();
    close(&log_probs.grad(), &[-1.28, -1.0, 0.8]);
}

/// Student 1/2, 1/4 and the rest, teacher 1/4, 1/2 and the rest.
#[test]
fn the_kl_over_the_top_k_and_the_rest() {
    let logs = |values: [f32; 2]| vector(&values.map(f32::ln)).view([1, 2]);
    let found = loss::topk_kl(&logs([0.5, 0.25]), &logs([0.25, 0.5]));
    close(&found.kl, &[0.25 * 2.0_f32.ln()]);
    close(&found.entropy, &[1.5 * 2.0_f32.ln()]);
    // Nothing is left for the rest: its log is that of 1e-7, and a constant.
    let student = logs([0.5, 0.5]).set_requires_grad(true);
    let found = loss::topk_kl(&student, &logs([0.25, 0.25]));
    close(&found.kl, &[2.0_f32.ln() - 1.5e-6]);
    found.kl.sum(Kind::Float).backward();
    // p (log p - log t + 1).
    close(&student.grad().view(-1), &[0.5 * (2.0_f32.ln() + 1.0); 2]);
}

#[test]
fn importance_weights_are_cut_or_dropped() {
    let old = vector(&[0.0, 0.0, 0.0]);
    // Weights 3, 1, 0.25.
    let rollout = vector(&[-1.098_612_3, 0.0, 1.386_294_4]);
    close(&loss::truncated_importance(&old, &rollout, 0.0, 2.0), &[2.0, 1.0, 0.25]);
    close(&loss::icepop_importance(&old, &rollout, 0.5, 2.0), &[0.0, 1.0, 0.0]);
}

#[test]
fn a_reference_far_away_stays_finite() {
    for kind in [KlKind::K3, KlKind::LowVar] {
        let log_probs = leaf(&[-900.0, -1.0]);
        let kl = loss::approximate_kl(kind, &log_probs, &vector(&[-1.0, -900.0]), None);
        kl.sum(Kind::Float).backward();
        assert!(floats(&kl).iter().chain(&floats(&log_probs.grad())).all(|x| x.is_finite()));
    }
}

#[test]
fn reductions_weigh_samples_or_tokens() {
    assert_eq!(loss::weights(&[2, 0, 1], Reduction::Sample), [1.0 / 6.0, 1.0 / 6.0, 1.0 / 3.0]);
    // The sample without tokens counts as one.
    assert_eq!(loss::weights(&[2, 0, 1], Reduction::Token), [0.25; 3]);
    assert_eq!(loss::weights(&[0, 0], Reduction::Sample), Vec::<f32>::new());
    let nothing = loss::reduce(&vector(&[]), &vector(&[]));
    assert_eq!(nothing.double_value(&[]), 0.0);
}

#[test]
fn one_value_alone_has_no_variance() {
    close(&loss::whiten(&vector(&[3.0])), &[0.0]);
    close(&loss::whiten(&vector(&[1.0, 3.0])), &[-0.5_f32.sqrt(), 0.5_f32.sqrt()]);
}

#[test]
fn log_probs_and_entropy_by_hand() {
    let logits = vector(&[0.0, 3.0_f32.ln(), 0.0, 0.0]).view([2, 2]);
    let ids = Tensor::from_slice(&[1_i64, 0]);
    close(&loss::log_probs(&logits, &ids), &[0.75_f32.ln(), 0.5_f32.ln()]);
    let uneven = -(0.75 * 0.75_f32.ln() + 0.25 * 0.25_f32.ln());
    close(&loss::entropy(&logits), &[uneven, 2.0_f32.ln()]);
}

/// Two candidates for two positions, k = 2. The student has ids 1 and 2.
fn candidates() -> loss::Candidates {
    let ids = |ids: &[i64], shape: &[i64]| Tensor::from_slice(ids).view(shape);
    let values = |values: &[f32], shape: &[i64]| Tensor::from_slice(values).view(shape);
    loss::Candidates {
        student_ids: ids(&[1, 2, 1, 2], &[2, 2]),
        ids: ids(&[3, 2, 3, 4, 1, 2, 2, 5], &[2, 2, 2]),
        log_probs: values(&[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8], &[2, 2, 2]),
        at_student: Some(values(&[-1.0, -0.2, -3.0, -4.0, -0.5, -0.6, -2.0, -0.7], &[2, 2, 2])),
    }
}

fn integers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64).contiguous().view(-1)).unwrap()
}

#[test]
fn a_candidate_is_chosen_by_overlap() {
    let choose = |selection, spans: Option<&[(i64, i64)]>| {
        let which = SubsetIds::Overlap;
        loss::select_subset(&candidates(), selection, which, spans).unwrap()
    };
    // Overlaps: 1 and 0, then 2 and 1.
    let subset = choose(HintSelection::Sequence, None);
    assert_eq!((integers(&subset.chosen), integers(&subset.overlap)), (vec![1, 1], vec![2, 1]));
    assert_eq!(integers(&subset.inside), [1, 1, 0, 1]);
    close(&subset.teacher.view(-1), &[-0.5, -0.6, 0.0, -0.7]);
    assert_eq!(integers(&choose(HintSelection::Token, None).chosen), [1, 1]);
    let subset = choose(HintSelection::Shortest, None);
    assert_eq!(
        (integers(&subset.chosen), integers(&subset.inside)),
        (vec![0, 0], vec![0, 1, 0, 0])
    );
    // Outside every span the first teaches.
    let subset = choose(HintSelection::Sequence, Some(&[(1, 2)]));
    assert_eq!(integers(&subset.chosen), [0, 1]);
    close(&subset.size(), &[1.0, 1.0]);
}

#[test]
fn a_teacher_value_that_is_no_number_takes_its_candidate_out() {
    for odd in [f64::NAN, f64::NEG_INFINITY] {
        let mut broken = candidates();
        let _ = broken.at_student.as_mut().unwrap().get(1).get(0).get(1).fill_(odd);
        let student = SubsetIds::Student;
        let choose = |selection| loss::select_subset(&broken, selection, student, None).unwrap();
        // The other candidate is left at that token.
        let subset = choose(HintSelection::Token);
        assert_eq!(integers(&subset.chosen), [0, 1]);
        assert_eq!(integers(&subset.unusable), [0, 0]);
        // Over the answer both overlap by 1: the first.
        assert_eq!(integers(&choose(HintSelection::Sequence).chosen), [0, 0]);
        let _ = broken.at_student.as_mut().unwrap().get(0).get(0).fill_(odd);
        let choose = |selection| loss::select_subset(&broken, selection, student, None).unwrap();
        let subset = choose(HintSelection::Sequence);
        assert_eq!(
            (integers(&subset.chosen), integers(&subset.unusable)),
            (vec![1, 1], vec![1, 0])
        );
        // Nothing is taught there, and nothing is NaN.
        let old = Tensor::from_slice(&[-1.0_f32, -1.0, -1.0, -1.0]).view([2, 2]);
        let worth = loss::topk_advantages(&subset, &old, &old, DistillWeights::Policy, Some(1.0));
        let current = old.copy().set_requires_grad(true);
        let ratio = loss::log_ratio(&current, &old);
        let found = loss::topk_surrogate(&ratio, &worth.advantages, &subset.inside, &CLIP);
        // d = clip(-1) and 0.3, each with half of the weight.
        close(&found.loss, &[0.0, 0.35]);
        found.loss.sum(Kind::Float).backward();
        close(&current.grad().view(-1), &[0.0, 0.0, 0.5, -0.15]);
    }
}

/// The policy says 0.01 and 0.5 where the teacher says 0.6 and 0.2: by hand, 1/51 and
/// 50/51, or 3/4 and 1/4, of d = clip(ln 60, 2) and ln 0.4.
#[test]
fn ids_are_weighed_by_the_policy_or_by_the_teacher() {
    let logs = |values: [f32; 2]| Tensor::from_slice(&values).log().view([1, 2]);
    let ids = Tensor::from_slice(&[7_i64, 3]).view([1, 2]);
    let candidates = loss::Candidates {
        student_ids: ids.shallow_clone(),
        ids: ids.unsqueeze(0),
        log_probs: logs([0.6, 0.2]).unsqueeze(0),
        at_student: None,
    };
    let (first, teacher) = (HintSelection::Shortest, SubsetIds::Teacher);
    let subset = loss::select_subset(&candidates, first, teacher, None).unwrap();
    let old = logs([0.01, 0.5]);
    let advantages = |weights| {
        loss::topk_advantages(&subset, &old, &old, weights, Some(2.0)).advantages.view(-1)
    };
    close(&advantages(DistillWeights::Policy), &[2.0 / 51.0, -0.9162907 * 50.0 / 51.0]);
    close(&advantages(DistillWeights::Teacher), &[1.5, -0.9162907 / 4.0]);
}

#[test]
fn an_id_that_stands_twice_is_refused() {
    let mut broken = candidates();
    broken.ids = Tensor::from_slice(&[3_i64, 2, 4, 4, 1, 2, 2, 5]).view([2, 2, 2]);
    let choose = |candidates: &loss::Candidates, which| {
        loss::select_subset(candidates, HintSelection::Token, which, None).unwrap_err().to_string()
    };
    let which = SubsetIds::Teacher;
    assert_eq!(choose(&broken, which), "candidate 0's top-k has an id twice at token 1");
    broken.student_ids = Tensor::from_slice(&[2_i64, 2, 1, 2]).view([2, 2]);
    assert_eq!(choose(&broken, which), "the student's top-k has an id twice at token 0");
    let unasked = loss::Candidates { at_student: None, ..candidates() };
    let wanted = "there are no teacher log-probs at the student's ids";
    assert_eq!(choose(&unasked, SubsetIds::Student), wanted);
}

/// Two tokens of a vocabulary of two, praised and blamed: the favoured one rises,
/// the other falls, whatever the loss.
#[test]
fn a_favoured_token_rises_under_every_loss() {
    type Loss = fn(&Tensor, &Tensor, &Tensor) -> Tensor;
    let losses: [(&str, Loss); 3] = [
        ("ppo", |own, old, a| loss::ppo_clip(&loss::log_ratio(own, old), a, &CLIP).loss),
        ("gspo", |own, old, a| {
            let ratio = loss::sequence_mean(&loss::log_ratio(own, old), &[2]);
            loss::ppo_clip(&ratio, a, &CLIP).loss
        }),
        ("cispo", |own, old, a| loss::cispo(own, old, a, &CLIP).loss),
    ];
    for (name, function) in losses {
        for (advantage, sign) in [(1.0, 1.0), (-1.0, -1.0)] {
            let logits = Tensor::zeros([2, 2], (Kind::Float, tch::Device::Cpu));
            let logits = logits.set_requires_grad(true);
            let own = loss::log_probs(&logits, &Tensor::from_slice(&[0_i64, 0]));
            let old = own.detach();
            function(&own, &old, &vector(&[advantage; 2])).mean(Kind::Float).backward();
            let moved = (&logits - logits.grad()).softmax(-1, Kind::Float).select(1, 0);
            let rise = floats(&(moved - 0.5));
            // Half of the gradient of each token's log-prob, 1/2 and -1/2: a quarter.
            let wanted = 1.0 / (1.0 + (-0.5_f32 * sign).exp()) - 0.5;
            assert!(rise.iter().all(|rise| (rise - wanted).abs() < 1e-6), "{name}: {rise:?}");
        }
    }
}

/// No answer, no token of one: nothing panics and nothing is NaN.
#[test]
fn of_nothing_there_is_no_loss() {
    let none = leaf(&[]);
    let ratio = loss::log_ratio(&none, &vector(&[]));
    let mut all = vec![
        loss::ppo_clip(&ratio, &vector(&[]), &CLIP).loss,
        loss::cispo(&none, &vector(&[]), &vector(&[]), &CLIP).loss,
        loss::approximate_kl(KlKind::LowVar, &none, &vector(&[]), None),
    ];
    for lengths in [&[0_i64; 0][..], &[0], &[0, 0]] {
        all.push(loss::sequence_mean(&ratio, lengths));
        assert_eq!(loss::opsm_keep(&ratio, &vector(&[]), lengths, 0.1).numel(), 0);
    }
    assert_eq!(loss::whiten(&vector(&[])).numel(), 0);
    let total = loss::reduce(&Tensor::cat(&all, 0), &vector(&[]));
    assert_eq!(total.double_value(&[]), 0.0);
    total.backward();
}

/// Likewise of no token with k ids, of tokens without an id, and of nobody who teaches.
#[test]
fn of_no_ids_there_is_no_distillation() {
    for shape in [[0_i64, 4], [2, 0], [0, 0]] {
        let empty = Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu));
        let found = loss::topk_kl(&empty, &empty);
        assert_eq!(floats(&found.kl), vec![0.0; shape[0] as usize], "{shape:?}");
        let ids = empty.to_kind(Kind::Int64);
        for which in [SubsetIds::Student, SubsetIds::Teacher, SubsetIds::Overlap] {
            let candidates = |count: i64| loss::Candidates {
                student_ids: ids.shallow_clone(),
                ids: ids.unsqueeze(0).repeat([count, 1, 1]),
                log_probs: empty.unsqueeze(0).repeat([count, 1, 1]),
                at_student: Some(empty.unsqueeze(0).repeat([count, 1, 1])),
            };
            for selection in
                [HintSelection::Sequence, HintSelection::Token, HintSelection::Shortest]
            {
                let subset = loss::select_subset(&candidates(2), selection, which, None).unwrap();
                assert_eq!(subset.ids.size(), shape);
                let worth = loss::topk_advantages(
                    &subset,
                    &empty,
                    &empty,
                    DistillWeights::Policy,
                    Some(1.0),
                );
                let (advantages, inside) = (&worth.advantages, &subset.inside);
                let found = loss::topk_surrogate(&empty, advantages, inside, &CLIP);
                assert_eq!(floats(&found.loss), vec![0.0; shape[0] as usize]);
                assert_eq!(floats(&found.clipped), vec![0.0; shape[0] as usize]);
            }
        }
    }
    // Where one side alone has none, nothing is in both.
    for (own, other) in [(0, 3), (3, 0)] {
        let ids = |k: i64| Tensor::from_slice(&[0_i64, 1, 2]).narrow(0, 0, k).repeat([2_i64, 1]);
        let candidates = loss::Candidates {
            student_ids: ids(own),
            ids: ids(other).unsqueeze(0),
            log_probs: -ids(other).unsqueeze(0).to_kind(Kind::Float),
            at_student: None,
        };
        let (first, both) = (HintSelection::Shortest, SubsetIds::Overlap);
        let subset = loss::select_subset(&candidates, first, both, None).unwrap();
        assert_eq!((subset.ids.size(), subset.teacher.size()), (vec![2, own], vec![2, own]));
        assert_eq!(floats(&subset.size()), [0.0, 0.0]);
    }
    let nobody = loss::Candidates {
        ids: Tensor::zeros([0, 2, 2], (Kind::Int64, tch::Device::Cpu)),
        log_probs: Tensor::zeros([0, 2, 2], (Kind::Float, tch::Device::Cpu)),
        at_student: None,
        ..candidates()
    };
    let (token, teacher) = (HintSelection::Token, SubsetIds::Teacher);
    let error = loss::select_subset(&nobody, token, teacher, None).unwrap_err();
    assert_eq!(error, loss::TopkError::NoCandidate);
}
