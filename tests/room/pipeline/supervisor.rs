//! The supervisor over processes of this machine.

use std::net::TcpListener;
use std::time::Duration;

use oclaw::pipeline::{Child, Launcher, Limits, Local, Process, Run, Supervisor, Tier};

const LIMITS: Limits = Limits {
    first_wait: Duration::ZERO,
    longest_wait: Duration::ZERO,
    steady: Duration::from_secs(60),
    give_up: 2,
    grace: Duration::from_secs(20),
    log_bytes: 1 << 20,
};

fn child(name: &str, tier: Tier, place: Option<&str>) -> Child {
    Child {
        name: name.to_owned(),
        tier,
        argv: ["sleep", "60"].map(str::to_owned).to_vec(),
        process: Process::default(),
        ready: place.map(|place| (format!("http://{place}"), Duration::from_secs(60))),
        vital: tier < Tier::Stage,
        digest: "d".to_owned(),
    }
}

/// Whoever answers where an engine is to be is not the engine: chats and weights would go to
/// somebody else's.
#[tokio::test]
async fn what_another_program_answers_for_is_not_started() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::new(folder.path());
    std::fs::create_dir(run.state()).unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = other.local_addr().unwrap().to_string();
    let children = vec![
        child("engine-policy", Tier::Engine, Some(&place)),
        child("serve", Tier::Serve, None),
        child("sync-weights", Tier::Stage, None),
    ];
    let launcher = Launcher::Local(Local::new(&run.state()));
    let mut supervisor = Supervisor::open(launcher, run, children, LIMITS).await.unwrap();
    // It is tried, rests, and is tried again.
    for _ in 0..3 {
        supervisor.tick().await;
    }
    let why = format!(
        "{place} is taken by another program: end it, or name another port in [engines.policy]"
    );
    let first = format!("engine-policy: {why}: tried again in 0.0 s");
    let second =
        format!("engine-policy: {why}, as each time of late: tried again every 0 s at least");
    assert_eq!(supervisor.take_told(), [first, second]);
    let status = supervisor.status();
    let phases: Vec<&str> = status.iter().map(|it| it.phase.as_str()).collect();
    assert_eq!(phases, ["failing", "waiting", "waiting"]);
    assert_eq!(status[0].last_end, Some(format!("could not be started: {why}")));
    assert_eq!((status[0].failures, status[0].pid), (2, None));
    // Once the place is free it is started.
    drop(other);
    for _ in 0..2 {
        supervisor.tick().await;
    }
    assert!(supervisor.status()[0].pid.is_some());
    supervisor.drain();
    while !supervisor.is_over() {
        supervisor.tick().await;
        tokio::task::yield_now().await;
    }
}
