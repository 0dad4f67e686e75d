//! A batch in parts: every turn is trained once, in one of them.

use oclaw::train::AdamW;

use super::*;

/// Log-probs of the answers under the weights that a step in parts leaves.
fn stepped(parts: u32, budget: usize, turns: &[Turn]) -> (Vec<Vec<f32>>, Vec<f32>) {
    let folder = tempfile::tempdir().unwrap();
    let options =
        Options { parts, tokens_per_pass: budget, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    let trained = train(&mut trainer, turns.to_vec()).unwrap();
    assert_eq!(trained.metrics.turns, turns.len() as u64);
    let policy = trained.policy.unwrap();
    assert_eq!(read_record(&policy).unwrap().updates, u64::from(parts));
    // Each is in the ledger once, and has gone into this step.
    assert_eq!(trainer.ledger().trained(), turns.len());
    for turn in turns {
        assert_eq!(trainer.ledger().entry(&turn.turn_id).unwrap().step, 1);
    }
    assert_eq!(train(&mut trainer, turns.to_vec()), None);
    let log_probs = turns.iter().map(|turn| response_log_prob(trainer.model(), turn)).collect();
    (weights(trainer.model()), log_probs)
}

fn weights(model: &Model) -> Vec<Vec<f32>> {
    let flat = |tensor: &Tensor| -> Vec<f32> { tensor.detach().view(-1).try_into().unwrap() };
    model.parameters().iter().map(|(_, tensor)| flat(tensor)).collect()
}

/// The same by hand: one update for each group of turns, the constants of all of them
/// taken before the first.
fn by_hand(groups: &[&[usize]], budget: usize, turns: &[Turn]) -> Vec<Vec<f32>> {
    let load = LoadOptions { trainable: true, ..LoadOptions::default() };
    let model = Model::load(&models().join("tiny-qwen3"), &load).unwrap();
    let admission = admission(Estimator::Combine);
    let samples: Vec<_> = turns.iter().map(|turn| admit(turn, 0, &admission).unwrap()).collect();
    let old = sample_log_probs(&model, &samples.iter().collect::<Vec<_>>(), budget);
    let batch: Vec<_> = samples
        .into_iter()
        .zip(old)
        .map(|(sample, old)| Prepared {
            advantages: vec![sample.reward.unwrap(); sample.mask.len()],
            old_log_probs: old.own,
            reference_log_probs: None,
            distilled: None,
            sample,
        })
        .collect();
    let rates = Rates { learning_rate: 1e-3, ..Rates::default() };
    let mut optimizer = AdamW::new(rates, model.trained());
    for group in groups {
        zero_gradients(model.trained());
        let part: Vec<_> = group.iter().map(|turn| batch[*turn].clone()).collect();
        gradients(&model, &part, &terms(), budget);
        optimizer.step(model.trained(), Dtype::F32).unwrap();
    }
    weights(&model)
}

/// One token of budget: a pass for each sequence. Many: all of a part in one.
#[test]
fn every_turn_moves_the_weights_once() {
    let turns = batch(1..=5);
    let cases: [(u32, &[&[usize]]); 4] = [
        (1, &[&[0, 1, 2, 3, 4]]),
        (2, &[&[0, 1], &[2, 3, 4]]),
        (3, &[&[0], &[1, 2], &[3, 4]]),
        (5, &[&[0], &[1], &[2], &[3], &[4]]),
    ];
    let mut ends: Vec<Vec<f32>> = Vec::new();
    for (parts, groups) in cases {
        let mut passes = Vec::new();
        for budget in [1, 1 << 20] {
            let (found, log_probs) = stepped(parts, budget, &turns);
            assert!(found == by_hand(groups, budget, &turns), "{parts} parts, budget {budget}");
            passes.push(log_probs);
        }
        // Packed or not, but for rounding.
        let off = passes[0].iter().zip(&passes[1]).map(|(one, other)| (one - other).abs());
        assert!(off.fold(0.0, f32::max) < 1e-2, "{parts} parts: {passes:?}");
        ends.extend(passes);
    }
    assert!(ends[0] != ends[2] && ends[2] != ends[4], "parts make a difference");
}

/// More parts than turns: those without any are none.
#[test]
fn a_part_without_turns_is_no_update() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { parts: 7, ..options("tiny-qwen3", folder.path()) };
    let mut trainer = Trainer::open(options).unwrap();
    let policy = policy(train(&mut trainer, batch(1..=2)));
    assert_eq!(read_record(&policy).unwrap().updates, 2);
}

/// A batch of two parts under importance weights of 1e38, which an advantage of 1e-30
/// stands and one of 1000 does not.
fn half_broken(folder: &Path) -> Options {
    let mut options = Options { parts: 2, ..options("tiny-qwen3", folder) };
    options.terms.importance = Importance::Truncated { low: 1e38, high: 1e38 };
    options
}

fn worth(number: u32, advantage: f32) -> Turn {
    Turn { rl_advantages: Some(vec![advantage; 3]), ..judged(number, 1.0) }
}

#[test]
fn a_part_that_is_not_finite_stays_untrained() {
    for broken in [0, 1] {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = Trainer::open(half_broken(folder.path())).unwrap();
        let turns = [1, 2, 3, 4].map(|number: u32| {
            let advantage = if (number - 1) / 2 == broken { 1000.0 } else { 1e-30 };
            worth(number, advantage)
        });
        let metrics = train(&mut trainer, turns.to_vec()).unwrap().metrics;
        assert_eq!((metrics.skipped_updates, metrics.turns, metrics.tokens), (1, 2, 6));
        assert_eq!(metrics.refused, BTreeMap::from([("not_finite_step".to_owned(), 2)]));
        for (place, turn) in turns.iter().enumerate() {
            let entry = trainer.ledger().entry(&turn.turn_id);
            let wanted = (place / 2 != broken as usize).then_some(1);
            assert_eq!(entry.map(|entry| entry.step), wanted, "{broken}: {}", turn.turn_id);
        }
        // Whoever comes after can train them.
        drop(trainer);
        let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
        let left = [1, 2].map(|number| judged(2 * broken + number, 1.0));
        assert_eq!(train(&mut trainer, left.to_vec()).unwrap().metrics.turns, 2);
        assert_eq!(trainer.ledger().trained(), 4);
    }
}

/// Neither is trained, and each is told by its own reason, in the step's numbers too.
#[test]
fn beside_a_part_that_is_not_finite_one_without_a_pull_is_told_as_that() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(half_broken(folder.path())).unwrap();
    let trained = train(&mut trainer, vec![worth(1, 0.0), worth(2, 1000.0)]).unwrap();
    assert_eq!((trained.policy, trained.metrics.skipped_updates), (None, 1));
    let counts = ["not_finite_step", "zero_advantage"].map(|reason| (reason.to_owned(), 1));
    assert_eq!(trained.metrics.refused, BTreeMap::from(counts));
    assert_eq!(trainer.refused(), &trained.metrics.refused);
}
