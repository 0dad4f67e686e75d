//! Sound turns and tables made of them.

use std::path::{Path, PathBuf};

#[cfg(feature = "torch")]
use oclaw::table::StageLine;
use oclaw::table::{Format, Provenance, Sink, Target};
use oclaw::trajectory::turn::{self, Micros};
use oclaw::trajectory::words::{
    LogProbKind, NextStateKind, RewardSource, SampleKind, SessionSource, Status, TokenSource,
    WeightVersionSource,
};
use oclaw::trajectory::{Sampling, Turn, Writer};

/// The stages in the order of the loop.
pub(crate) const STAGES: [Writer; 5] =
    [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp, Writer::Advantage];

/// Returns a sound captured turn: turn `number` of a session, three tokens long.
pub(crate) fn captured(session: &str, number: u32) -> Turn {
    let id = |number: u32| format!("{session}-turn-{number}");
    Turn {
        session_id: session.to_owned(),
        turn: number,
        turn_id: id(number),
        parent_turn_id: (number > 1).then(|| id(number - 1)),
        branch: "main".to_owned(),
        request_id: format!("{session}-request-{number}"),
        client: Some("alice".to_owned()),
        session_source: SessionSource::Header,
        session_confidence: 1.0,
        created_at: Micros(1_764_423_296_000_000 + i64::from(number) * 1_000_000),
        finished_at: Micros(1_764_423_296_500_000 + i64::from(number) * 1_000_000),
        model: "tiny".to_owned(),
        weight_version: Some("0".to_owned()),
        weight_version_end: Some("0".to_owned()),
        weight_version_source: WeightVersionSource::Answer,
        sampling: Sampling {
            temperature: Some(0.7),
            max_tokens: Some(64),
            log_prob_kind: LogProbKind::Raw,
            ..Sampling::default()
        },
        messages: r#"[{"role":"user","content":"What is 2 + 2?"}]"#.to_owned(),
        response: r#"{"role":"assistant","content":"It is 5."}"#.to_owned(),
        finish_reason: Some("stop".to_owned()),
        ends_with_stop_token: Some(true),
        status: Status::Complete,
        usage_completion_tokens: Some(3),
        prompt_ids: Some(vec![1, 2, 3, 4]),
        response_ids: Some(vec![5, 6, 2]),
        rollout_log_probs: Some(vec![Some(-0.5), Some(-1.25), None]),
        token_source: TokenSource::Engine,
        next_state: Some(r#"[{"role":"user","content":"No, it is 4."}]"#.to_owned()),
        next_state_kind: NextStateKind::User,
        ..Turn::default()
    }
}

/// Returns a sound turn that every stage has seen: judged -1, with one hint.
pub(crate) fn finished(session: &str, number: u32) -> Turn {
    Turn {
        score: Some(-1.0),
        votes: Some(vec![Some(-1), None, Some(-1)]),
        judge_text: Some(vec![Some("\\boxed{-1}".to_owned()), None, Some("bad".to_owned())]),
        hints: Some(vec!["The answer is 4.".to_owned(), "Two and two make four.".to_owned()]),
        hint_votes: Some(vec![Some(1), Some(1), Some(-1)]),
        teacher: Some("tiny".to_owned()),
        teacher_temperature: Some(1.0),
        student_version: Some("0".to_owned()),
        topk: Some(2),
        teacher_log_probs: Some(vec![Some(vec![-0.1, -0.2, -0.3]), None]),
        teacher_topk_ids: Some(vec![Some(vec![5, 6, 7, 8, 2, 3]), None]),
        teacher_topk_log_probs: Some(vec![Some(vec![-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]), None]),
        teacher_at_student: Some(vec![Some(vec![-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]), None]),
        student_topk_ids: Some(vec![5, 6, 7, 8, 2, 3]),
        student_topk_log_probs: Some(vec![-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]),
        teacher_error: Some(vec![None, Some("timeout".to_owned())]),
        reward: Some(-1.0),
        reward_source: Some(RewardSource::Judged),
        sample_kind: Some(SampleKind::OpdRl),
        promoted: Some(false),
        loss_mask: Some(vec![1, 1, 1]),
        rl_advantages: Some(vec![-1.0, -1.0, -1.0]),
        advantages: Some(vec![-0.6, -0.2, -1.3]),
        ..captured(session, number)
    }
}

/// Writes turns to a file.
pub(crate) fn write(path: &Path, format: Format, writers: &[Writer], turns: &[Turn]) -> PathBuf {
    write_as(path, format, (writers, turns), &Provenance::default())
}

/// Writes turns that every stage has seen to a file that says which estimator made it.
#[cfg(feature = "torch")]
pub(crate) fn write_made(path: &Path, estimator: &str, turns: &[Turn]) -> PathBuf {
    let made = StageLine {
        command: "advantage".to_owned(),
        argv: ["advantage", "--estimator", estimator].map(str::to_owned).to_vec(),
        ..StageLine::default()
    };
    let provenance = Provenance { lines: vec![made], ..Provenance::default() };
    write_as(path, Format::Parquet, (&STAGES, turns), &provenance)
}

fn write_as(
    path: &Path,
    format: Format,
    (writers, turns): (&[Writer], &[Turn]),
    provenance: &Provenance,
) -> PathBuf {
    let batch = turn::batch(writers, turns).unwrap();
    let target = Target::Path(path.to_owned());
    let mut sink = Sink::create(&target, Some(format), batch.schema(), provenance).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    path.to_owned()
}
