//! Which turns may be trained on, and why the others may not.

use super::*;

#[test]
fn a_policy_of_the_wrong_age_is_refused() {
    let of = |version: Option<&str>| Turn {
        weight_version: version.map(str::to_owned),
        ..judged(1, 1.0)
    };
    let admission = Admission { max_staleness: 1, ..admission(Estimator::Combine) };
    let reason = |turn: &Turn| admit(turn, 5, &admission).map(|sample| sample.staleness);
    assert_eq!(reason(&of(Some("5"))), Ok(0));
    assert_eq!(reason(&of(Some("4"))), Ok(1));
    for (version, wanted) in [
        (Some("3"), "stale"),
        (Some("0"), "stale"),
        (Some("default"), "stale"),
        (Some("6"), "version_from_the_future"),
        (Some("v1"), "version_unknown"),
        (None, "version_missing"),
    ] {
        let refusal = reason(&of(version)).unwrap_err();
        assert_eq!((refusal.reason.as_str(), refusal.fault), (wanted, None));
    }
    let named = |name: &str| Admission {
        version_aliases: BTreeMap::from([(name.to_owned(), 5)]),
        ..admission.clone()
    };
    assert!(admit(&of(Some("v1")), 5, &named("v1")).is_ok());
    assert!(admit(&of(None), 5, &named("none")).is_ok());
}

#[test]
fn the_temperature_of_ratios_is_that_of_the_servers_log_probs() {
    let of = |temperature, log_prob_kind| Turn {
        sampling: Sampling { temperature, log_prob_kind, ..Sampling::default() },
        ..judged(1, 1.0)
    };
    let plain = admission(Estimator::Combine);
    let found = |turn: &Turn, admission: &Admission| {
        admit(turn, 0, admission).map(|sample| sample.temperature).map_err(|error| error.reason)
    };
    assert_eq!(found(&of(Some(0.5), LogProbKind::Raw), &plain), Ok(1.0));
    assert_eq!(found(&of(Some(0.5), LogProbKind::Tempered), &plain), Ok(0.5));
    assert_eq!(found(&of(Some(0.0), LogProbKind::Tempered), &plain), Ok(1.0));
    let unknown = Err("temperature_unknown".to_owned());
    assert_eq!(found(&of(None, LogProbKind::Tempered), &plain), unknown);
    assert_eq!(found(&of(Some(0.5), LogProbKind::Unknown), &plain), unknown);
    let assumed = Admission { assume_temperature: Some(0.25), ..plain };
    assert_eq!(found(&of(Some(0.5), LogProbKind::Unknown), &assumed), Ok(0.25));
}

/// A noted turn whose log-probs are of a temperature.
fn tempered(number: u32, temperature: f32) -> Turn {
    let (temperature, log_prob_kind) = (Some(temperature), LogProbKind::Tempered);
    let sampling = Sampling { temperature, log_prob_kind, ..Sampling::default() };
    Turn { sampling, ..judged(number, 1.0) }
}

/// A table may say that tokens are trained which nobody sampled so.
#[test]
fn the_mask_does_not_stand_alone() {
    let plain = admission(Estimator::Combine);
    let untrainable = Some("log_probs_misaligned".to_owned());
    for (turn, reason) in [
        (Turn { status: Status::Failed, ..judged(1, 1.0) }, "failed"),
        (Turn { status: Status::Aborted, ..judged(1, 1.0) }, "aborted"),
        (Turn { token_source: TokenSource::Retokenized, ..judged(1, 1.0) }, "retokenized"),
        (Turn { token_source: TokenSource::None, ..judged(1, 1.0) }, "no_token_ids"),
        (Turn { prompt_ids: None, ..judged(1, 1.0) }, "no_token_ids"),
        (Turn { prompt_ids: Some(Vec::new()), ..judged(1, 1.0) }, "no_token_ids"),
        (Turn { untrainable_reason: untrainable, ..judged(1, 1.0) }, "log_probs_misaligned"),
    ] {
        let refusal = admit(&turn, 0, &plain).unwrap_err();
        let fault = format!("loss_mask is 1 in a row that must not be trained: {reason}");
        assert_eq!((refusal.reason.as_str(), refusal.fault), (reason, Some(fault)));
        let masked = Turn { loss_mask: Some(vec![0; 3]), ..turn };
        let refusal = admit(&masked, 0, &plain).unwrap_err();
        assert_eq!((refusal.reason.as_str(), refusal.fault), (reason, None));
    }
}

#[test]
fn a_turn_without_an_id_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let nameless = Turn { turn_id: String::new(), ..judged(1, 1.0) };
    let trained = train(&mut trainer, [vec![nameless], batch(2..=2)].concat()).unwrap();
    assert_eq!(trained.metrics.turns, 1);
    assert_eq!(trainer.faults()[0].problem, "turn_id is empty");
    assert_eq!(trainer.ledger().entry(""), None);
}

/// A teacher that says next to nothing of a token makes an advantage that is none.
#[test]
fn an_advantage_of_no_size_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let far = Some(vec![Some(vec![-0.1, -1e30, -0.3]), None]);
    let turn = Turn { teacher_log_probs: far, ..finished("t", 1) };
    let trained = train(&mut trainer, [vec![turn], batch(2..=2)].concat()).unwrap();
    assert_eq!((trained.metrics.turns, trained.metrics.skipped_updates), (1, 0));
    let problem = "the advantage is -1e30 at token 1, more than 1000000 in size";
    assert_eq!(trainer.faults()[0].problem, problem);
}

#[test]
fn a_broken_row_is_refused_by_name_and_the_others_train() {
    let broken = [
        Turn { advantage_error: Some("no luck".to_owned()), ..judged(1, 1.0) },
        Turn { rollout_log_probs: Some(vec![Some(-0.5); 2]), ..judged(2, 1.0) },
        Turn { rollout_log_probs: Some(vec![Some(f32::NAN); 3]), ..judged(3, 1.0) },
        Turn { loss_mask: Some(vec![1; 2]), ..judged(4, 1.0) },
        Turn { response_ids: Some(vec![5, 1024, 2]), ..judged(5, 1.0) },
        Turn { response_ids: Some(vec![5, -1, 2]), ..judged(6, 1.0) },
        Turn { reward: Some(f32::NAN), ..judged(7, 1.0) },
        Turn { teacher_log_probs: Some(vec![Some(vec![-0.5; 4])]), ..judged(8, 1.0) },
        Turn { teacher_temperature: Some(0.0), ..judged(11, 1.0) },
        Turn { teacher_temperature: Some(f32::NAN), ..judged(12, 1.0) },
        tempered(13, 1e-30),
        tempered(14, f32::INFINITY),
        Turn { rl_advantages: Some(vec![1e38; 3]), ..judged(15, 1.0) },
        Turn { rl_advantages: Some(vec![1.0, f32::NAN, 1.0]), ..judged(16, 1.0) },
        Turn { loss_mask: Some(vec![1, 2, 1]), ..judged(17, 1.0) },
        Turn { loss_mask: Some(vec![1, 1, -1]), ..judged(18, 1.0) },
        Turn { reward: Some(7e30), ..judged(19, 1.0) },
        Turn { rollout_log_probs: Some(vec![Some(5.0); 3]), ..judged(20, 1.0) },
    ];
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::open(options("tiny-qwen3", folder.path())).unwrap();
    let count = broken.len();
    let trained = train(&mut trainer, [broken.to_vec(), batch(9..=10)].concat()).unwrap();
    assert_eq!(trained.metrics.turns, 2);
    assert_eq!(trainer.faults().len(), count);
    for (number, words) in [
        (1, "no luck"),
        (2, "rollout_log_probs has 2 values for 3 response ids"),
        (3, "rollout_log_probs is not finite at token 0"),
        (4, "loss_mask has 2 values for 3 response ids"),
        (5, "token id 1024 is not among the model's 1024"),
        (6, "response_ids has id -1 at token 1"),
        (7, "reward is NaN"),
        (8, "teacher_log_probs[0] has 4 values for 3 response ids"),
        (11, "teacher_temperature is 0.0, wanted a number, 0.0001 or more"),
        (12, "teacher_temperature is NaN, wanted a number, 0.0001 or more"),
        (13, "temperature is 1e-30, wanted a number, 0.0001 or more"),
        (14, "temperature is inf, wanted a number, 0.0001 or more"),
        (15, "rl_advantages is 1e38 at token 0, more than 1000000 in size"),
        (16, "rl_advantages is not finite at token 1"),
        (17, "loss_mask is 2 at token 1, wanted 0 or 1"),
        (18, "loss_mask is -1 at token 2, wanted 0 or 1"),
        (19, "wanted -1 to 1"),
        (20, "rollout_log_probs is 5 at token 0, above 0"),
    ] {
        let name = format!("s-turn-{number}");
        let fault = trainer.faults().iter().find(|fault| fault.turn_id == name).unwrap();
        assert!(fault.problem.contains(words), "{}", fault.problem);
        assert!(trainer.ledger().entry(&name).unwrap().refused.is_some());
    }
}
