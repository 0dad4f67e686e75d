//! A disk of the test's own, which can be filled.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Loop;
use super::chats::converse;
use super::stages::{ONLY_JUDGE, config, engine, pending};

pub(super) struct Disk(PathBuf);

impl Disk {
    /// Mounts one. Nothing if nothing can be mounted here.
    pub(super) fn mount(at: &Path) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs"];
        let mounted = Command::new("mount").args(options).arg(at).output();
        mounted.is_ok_and(|it| it.status.success()).then(|| Self(at.to_owned()))
    }

    pub(super) fn fill(&self) {
        let mut filler = fs::File::create(self.0.join(".filler")).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        // To the last byte.
        while filler.write_all(&[0]).is_ok() {}
    }

    pub(super) fn empty(&self) {
        fs::remove_file(self.0.join(".filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// The journal, the shards, the logs, the loop's own state: none of it finds room.
/// Chats go on; what is captured afterwards goes all the way.
#[test]
fn a_full_disk_under_everything_breaks_no_chat_and_heals() {
    let upstream = engine();
    let rest = format!("[judge]\nrules = \"\"\npoll = \"100ms\"\n{ONLY_JUDGE}");
    let looped = Loop::new(&config(&upstream.url(), &rest));
    let Some(disk) = Disk::mount(&looped.path("run")) else {
        println!("skipped: nothing can be mounted here");
        return;
    };
    let mut running = looped.start();
    running.hears("serve: ready");
    assert_eq!(converse(&looped.front, "before", 3), 0);
    looped.until("turns are ready", |status| pending(status, "nobody") == 2);
    disk.fill();
    assert_eq!(converse(&looped.front, "meanwhile", 4), 0, "a chat had to be sent again");
    disk.empty();
    assert_eq!(converse(&looped.front, "after", 3), 0);
    let status = looped.until("what came later is ready", |status| pending(status, "nobody") >= 4);
    // Of those in between some may have been kept: none is counted that is not.
    let captured = status["account"]["captured"].as_i64().unwrap();
    assert!((4..=7).contains(&captured), "{status:#}");
    assert_eq!(running.stop().0, Some(0));
    drop(looped);
}
