//! What a person sees of a loop: one picture, drawn again and again, and lines above.

use std::process::{Child, Command, Stdio};

use super::super::terminal::{CLOSED, Screen, seen, terminal, watched};
use super::Loop;
use super::chats::converse;
use super::signal;
use super::stages::{ONLY_JUDGE, config, engine};

/// Runs a command on a terminal.
fn shown(like: &assert_cmd::Command, looped: &Loop) -> (Child, Screen) {
    let (ours, theirs) = terminal();
    let mut command = Command::new(like.get_program());
    command.args(like.get_args()).current_dir(looped.path("")).env("TERM", "xterm");
    for (name, value) in like.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let both = theirs.try_clone().unwrap();
    command.stdin(Stdio::null()).stdout(both).stderr(theirs);
    let child = command.spawn().unwrap();
    drop(command);
    (child, watched(ours))
}

/// Returns what stands on a terminal in the end, line by line.
fn picture(screen: &Screen) -> Vec<String> {
    let text = screen.0.lock().unwrap().replace('\r', "").replace(CLOSED, "");
    // Lines that are too long are cut, where they would else be two.
    assert!(text.contains("\x1b[?7l"), "{text}");
    let text = text.replace("\x1b[?7l", "").replace("\x1b[?7h", "");
    let mut lines = vec![String::new()];
    let mut pieces = text.split("\x1b[").enumerate();
    let put = |lines: &mut Vec<String>, text: &str| {
        let mut rest = text.split('\n');
        lines.last_mut().unwrap().push_str(rest.next().unwrap());
        lines.extend(rest.map(str::to_owned));
    };
    while let Some((number, piece)) = pieces.next() {
        match piece.split_once('A').filter(|_| number > 0) {
            // So many lines up, and everything below is taken away.
            Some((up, "")) => {
                let (_, below) = pieces.next().unwrap();
                let rest = below.strip_prefix('J').unwrap();
                let keep = lines.len() - up.parse::<usize>().unwrap() - 1;
                lines.truncate(keep);
                lines.push(String::new());
                put(&mut lines, rest);
            }
            _ => put(&mut lines, piece),
        }
    }
    lines
}

#[test]
fn a_terminal_shows_one_picture_with_lines_above() {
    let upstream = engine();
    let rest = format!("[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}");
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let (mut child, screen) = shown(&looped.command(), &looped);
    seen(&screen, &["serve: ready after", "process", "in a row", "rows wait", "captured 0 = "]);
    assert_eq!(converse(&looped.front, "first", 3), 0);
    seen(&screen, &["captured 2 = trained 0 + refused 0 + pending 2 (nobody 2); 1 more are open"]);
    let lines = picture(&screen);
    let count = |words: &[&str]| {
        let has = |line: &&String| words.iter().all(|word| line.contains(word));
        lines.iter().filter(has).count()
    };
    assert_eq!(count(&["process", "state", "restarts", "last end"]), 1, "{lines:#?}");
    assert_eq!(count(&["stage", "shards wait", "rows/min"]), 1, "{lines:#?}");
    assert_eq!(count(&["serve", "up", "0 "]), 1, "{lines:#?}");
    assert_eq!(count(&["serve: ready after"]), 1, "what is said stays: {lines:#?}");
    assert_eq!(count(&["policy: published none"]), 1, "{lines:#?}");

    // Whoever asks beside it gets the same, as tables.
    let mut ask = crate::harness::oclaw();
    ask.args(["loop", "--status", "run"]);
    let (mut asking, told) = shown(&ask, &looped);
    assert_eq!(asking.wait().unwrap().code(), Some(0));
    seen(&told, &["process", "advantage", "captured 2 = trained 0"]);

    signal(i64::from(child.id()), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    seen(&screen, &["ending: serve first", "serve: ended", CLOSED]);
    let lines = picture(&screen);
    assert!(lines.iter().any(|line| line.starts_with("captured 2 = ")), "{lines:#?}");
}
