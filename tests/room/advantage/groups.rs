//! Rewards held against those of other rows.

use oclaw::advantage::{self, Estimator, Method, Standing, note_among};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{SampleKind, Status};

use super::{close, method, whole, without_hint};

#[test]
fn leave_one_out_by_hand() {
    let groups = [0, 0, 0, 1, 2, 2];
    let found = advantage::rloo(&[1.0, 0.0, -1.0, 1.0, 0.1, 0.1], &groups);
    close(&found, &[1.5, 0.0, -1.5, 0.0, 0.0, 0.0]);
    let found = advantage::rloo(&[1.0, f32::NAN, 0.5], &[0, 0, 0]);
    assert!(found[1].is_nan());
    close(&[found[0], found[2]], &[0.5, -0.5]);
}

#[test]
fn rewards_are_held_against_their_group() {
    let scored = |number: u32, score: Option<f32>| Turn { score, ..without_hint(number) };
    let lost = Turn { status: Status::Failed, ..scored(5, Some(1.0)) };
    let turns =
        [scored(1, Some(1.0)), scored(2, Some(-1.0)), scored(3, Some(0.0)), scored(4, None), lost];
    let members: Vec<_> =
        turns.iter().map(|turn| advantage::member(turn, None, Some(7), 0.0)).collect();
    let part = |estimator: Estimator, row: usize| {
        let method = method(estimator);
        let shares = advantage::shares(&method, &members);
        let share = shares.get(&turns[row].turn_id).copied();
        let standing = Standing { share, ..Standing::default() };
        note_among(turns[row].clone(), standing, &method)
    };
    // Neither the unjudged turn nor the lost one counts: 1, -1, 0.
    close(&part(Estimator::Rloo, 0).rl_advantages.unwrap(), &[1.5; 3]);
    close(&part(Estimator::ReinforcePlusPlusBaseline, 1).rl_advantages.unwrap(), &[-1.0; 3]);
    close(&part(Estimator::Grpo, 1).advantages.unwrap(), &[-0.999_999; 3]);
    // What is neutral counts, and is not trained.
    let neutral = part(Estimator::Rloo, 2);
    assert_eq!(
        (neutral.sample_kind, neutral.loss_mask),
        (Some(SampleKind::None), Some(vec![0; 3]))
    );
    assert_eq!(part(Estimator::Rloo, 3).rl_advantages, None);
}

#[test]
fn later_rewards_count_for_earlier_turns() {
    let method = Method { gamma: 0.5, lambda: 0.5, ..method(Estimator::Gae) };
    let scored = |number: u32, score: Option<f32>| Turn { score, ..whole(number) };
    // The rows in any order; a second third turn on a branch of its own.
    let edited = Turn {
        turn_id: "edited".to_owned(),
        branch: "b".to_owned(),
        score: Some(-1.0),
        ..scored(3, None)
    };
    let turns = [scored(3, Some(1.0)), edited, scored(2, None), scored(1, Some(-1.0))];
    let members: Vec<_> =
        turns.iter().map(|turn| advantage::member(turn, None, None, 0.5)).collect();
    let shares = advantage::shares(&method, &members);
    let found: Vec<f32> = turns.iter().map(|turn| shares[&turn.turn_id]).collect();
    // d3 = 1 - 0.5; d2 = 0.25 - 0.5; d1 = -1 + 0.25 - 0.5; A = d + A'/4.
    close(&found, &[0.5, -1.5, -0.125, -1.281_25]);
}
