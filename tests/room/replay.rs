//! The gate's rule on made-up scores: how often it is wrong.

use oclaw::replay::gate::{Pair, Rule, Verdict, compare};

/// Uniform numbers, seeded.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64) / ((1_u64 << 31) as f64)
    }

    /// Roughly normal, standard deviation 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// Scores of two policies of which the candidate is better by `gain`: items vary
/// much, sessions have a mood of their own, and both policies share both.
fn scores(seed: u64, sessions: usize, gain: f64) -> Vec<Vec<Pair>> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (0..sessions)
        .map(|_| {
            let (mood, favour) = (random.normal(), 0.2 * random.normal());
            (0..5)
                .map(|_| {
                    let item = mood + random.normal();
                    Pair {
                        candidate: item + gain + favour + 0.3 * random.normal(),
                        current: item + 0.3 * random.normal(),
                    }
                })
                .collect()
        })
        .collect()
}

fn rule(seed: u64) -> Rule {
    Rule { margin: 0.2, least_items: 20, resamples: 1_000, seed }
}

/// Returns how many of 100 suites end as promote, reject, undecided.
fn verdicts(sessions: usize, gain: f64) -> (usize, usize, usize) {
    let of = |seed| compare(&scores(seed, sessions, gain), &rule(seed)).unwrap().verdict;
    let verdicts: Vec<_> = (0..100).map(of).collect();
    let count = |wanted| verdicts.iter().filter(|verdict| **verdict == wanted).count();
    (count(Verdict::Promote), count(Verdict::Reject), count(Verdict::Undecided))
}

#[test]
fn false_alarms_are_as_rare_as_the_interval_says() {
    for sessions in [10, 30, 60] {
        let (promoted, alarms, undecided) = verdicts(sessions, 0.0);
        println!(
            "gate, equal policies, {sessions} sessions of 5: promote {promoted}, \
             reject {alarms} (false alarms), undecided {undecided} of 100"
        );
        // The interval leaves 2.5 % below; 100 draws of that exceed 8 once in 700.
        assert!(alarms <= 8, "{alarms} false alarms in 100, {sessions} sessions");
    }
    let (promoted, rejected, _) = verdicts(60, -0.5);
    println!("gate, candidate worse by 0.5, 60 sessions: reject {rejected} of 100");
    assert_eq!((promoted, rejected), (0, 100));
    let (promoted, _, _) = verdicts(60, 0.3);
    assert_eq!(promoted, 100);
}

#[test]
fn the_rule_has_three_ends() {
    let suite = |difference: f64, items: usize| -> Vec<Vec<Pair>> {
        let pair = Pair { candidate: 1.0 + difference, current: 1.0 };
        vec![vec![pair; items]; 5]
    };
    let verdict = |difference: f64, items: usize| {
        compare(&suite(difference, items), &rule(0)).unwrap().verdict
    };
    assert_eq!(verdict(0.0, 4), Verdict::Promote);
    assert_eq!(verdict(0.5, 4), Verdict::Promote);
    // Worse for sure is worse, margin or not.
    assert_eq!(verdict(-0.125, 4), Verdict::Reject);
    // 15 items are too few, 4 sessions as well.
    assert_eq!(verdict(-1.0, 3), Verdict::Undecided);
    assert_eq!(compare(&suite(0.0, 10)[..4], &rule(0)).unwrap().verdict, Verdict::Undecided);
    // Rounding that leans to one side is no loss.
    let rounding = compare(&suite(-1e-5, 10), &rule(0)).unwrap();
    assert_eq!((rounding.verdict, rounding.interval), (Verdict::Promote, (0.0, 0.0)));
    assert_eq!(compare(&[Vec::new()], &rule(0)), None);
    let figures = compare(&suite(0.25, 4), &rule(0)).unwrap();
    assert_eq!((figures.items, figures.sessions), (20, 5));
    assert_eq!((figures.candidate, figures.current, figures.difference), (1.25, 1.0, 0.25));
    assert_eq!(figures.interval, (0.25, 0.25));
    // Noise on both sides of nothing, wider than the margin.
    let noisy: Vec<_> = (0..10)
        .map(|number| {
            let candidate = if number % 2 == 0 { 1.0 } else { -1.0 };
            vec![Pair { candidate, current: 0.0 }; 2]
        })
        .collect();
    assert_eq!(compare(&noisy, &rule(0)).unwrap().verdict, Verdict::Undecided);
    assert_eq!(compare(&noisy, &rule(0)), compare(&noisy, &rule(0)));
}
