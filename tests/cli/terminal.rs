//! What a person sees on a terminal while a stage runs, and that nobody else does.

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use oclaw::table::Format;
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

use super::judge::says;
use crate::forge::{captured, write};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw;

const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal of 120 columns: our side of it, and the program's.
pub(super) fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: both numbers and the size are ours; the name and the settings may be null.
    let made = unsafe {
        let (name, settings) = (std::ptr::null_mut(), std::ptr::null());
        libc::openpty(&raw mut ours, &raw mut theirs, name, settings, &raw const size)
    };
    assert_eq!(made, 0);
    // SAFETY: both were opened just now, and nobody else has them.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// What was shown so far, and the event that there is more.
pub(super) type Screen = Arc<(Mutex<String>, Condvar)>;

/// What a screen shows last: everybody who wrote to it is gone.
pub(super) const CLOSED: &str = "\0";

pub(super) fn watched(mut side: File) -> Screen {
    let screen = Screen::default();
    let shown = screen.clone();
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        // Our side ends with an error when the last of theirs is closed.
        while let Ok(count @ 1..) = side.read(&mut piece) {
            shown.0.lock().unwrap().push_str(&String::from_utf8_lossy(&piece[..count]));
            shown.1.notify_all();
        }
        shown.0.lock().unwrap().push_str(CLOSED);
        shown.1.notify_all();
    });
    screen
}

pub(super) fn seen(screen: &Screen, words: &[&str]) {
    let lacks = |shown: &mut String| !words.iter().all(|words| shown.contains(words));
    let guard = screen.0.lock().unwrap();
    let (shown, waited) = screen.1.wait_timeout_while(guard, PATIENCE, lacks).unwrap();
    assert!(!waited.timed_out(), "{words:?} are not all in {shown:?}");
}

fn judging(folder: &Path, fake: &FakeEngine, flags: &[&str]) -> (Child, Screen) {
    let turn = |number| Turn {
        next_state: Some(json!([{"role": "user", "content": "hm"}]).to_string()),
        ..captured("s", number)
    };
    let turns: Vec<_> = (1..=10).map(turn).collect();
    let input = write(&folder.join("in.parquet"), Format::Parquet, &[Writer::Serve], &turns);
    let (ours, theirs) = terminal();
    let like = oclaw();
    let mut command = Command::new(like.get_program());
    for (name, value) in like.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .args(["judge", "--votes", "1", "--at-once", "1", "--engine", &fake.url(), "-o"])
        .args([&folder.join("out.parquet"), &input])
        .args(flags)
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(theirs);
    let child = command.spawn().unwrap();
    // The program's side is open in the program alone.
    drop(command);
    (child, watched(ours))
}

fn judge() -> FakeEngine {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "m"}]}))]);
    fake.on(CHAT, [Reply::json(200, says("\\boxed{1}", "stop").1)]);
    fake
}

#[test]
fn a_terminal_shows_rate_and_time_left() {
    let (folder, fake) = (tempfile::tempdir().unwrap(), judge());
    fake.hold_after(CHAT, 6);
    let (mut child, screen) = judging(folder.path(), &fake, &[]);
    fake.arrived(CHAT, 7);
    seen(&screen, &["judge ", " 6/10 ", "/s eta "]);
    fake.release();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    seen(&screen, &["oclaw judge", "judged", "calls"]);

    // Asked to be quiet, it is.
    let (mut child, screen) = judging(folder.path(), &fake, &["-q"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    seen(&screen, &[CLOSED]);
    assert_eq!(*screen.0.lock().unwrap(), CLOSED);
}
