//! What a followed folder has to do, and who may write where.

use std::fs;
use std::path::Path;

use oclaw::table::{Claim, Error, Follow, Format, Shard, shard_names};
use oclaw::trajectory::Turn;
use oclaw::trajectory::turn::Micros;

use super::{SERVE, folder};
use crate::forge::{captured, write};

fn at(folder: &Path, name: &str, instant: i64) {
    let turn = Turn { created_at: Micros(instant), ..captured(name, 1) };
    write(&folder.join(name), Format::Parquet, SERVE, &[turn]);
}

fn names(due: &[Shard]) -> Vec<String> {
    due.iter().map(|shard| shard.name.to_string_lossy().into_owned()).collect()
}

#[test]
fn shards_come_in_the_order_of_their_turns() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let mut follow = Follow::new(folder.path());
    assert!(follow.due(&|_| false, &|_| false).unwrap().is_empty());
    for (name, instant) in [("b.parquet", 2), ("a.parquet", 3), ("d.parquet", 2), ("c.parquet", 9)]
    {
        at(folder.path(), name, instant);
    }
    at(folder.path(), ".tmp-shard-x.parquet", 1);
    at(folder.path(), "e.arrow", 1);
    fs::create_dir(path("f.parquet")).unwrap();
    // It is being written by somebody who does not rename.
    let whole = fs::read(path("a.parquet")).unwrap();
    fs::write(path("0.parquet"), &whole[..whole.len() / 2]).unwrap();
    let due = follow.due(&|_| false, &|_| false).unwrap();
    assert_eq!(names(&due), ["b.parquet", "d.parquet", "a.parquet", "c.parquet", "0.parquet"]);
    let broken = due[4].clone();
    let mut left = follow.due(&|name| name != "0.parquet", &|shard| *shard == broken).unwrap();
    assert!(left.is_empty());
    // Written to its end it is another file.
    fs::write(path("0.parquet"), &whole).unwrap();
    left = follow.due(&|name| name == "b.parquet", &|shard| *shard == broken).unwrap();
    assert_eq!(names(&left), ["d.parquet", "0.parquet", "a.parquet", "c.parquet"]);
    fs::remove_file(path("d.parquet")).unwrap();
    assert_eq!(
        names(&follow.due(&|_| false, &|_| false).unwrap())[..2],
        ["b.parquet", "0.parquet"]
    );
    assert!(shard_names(folder.path()).unwrap().contains(std::ffi::OsStr::new("c.parquet")));
    assert!(matches!(
        Follow::new(&path("none")).due(&|_| false, &|_| false),
        Err(Error::Read { .. })
    ));
}

#[test]
fn a_folder_has_one_claim_and_it_clears_away_what_is_nobodys() {
    let folder = folder();
    let out = folder.path().join("made/on/the/way");
    let claim = Claim::take(&out).unwrap();
    let named = out.display().to_string();
    assert!(matches!(Claim::take(&out), Err(Error::InUse { name }) if name == named));
    drop(claim);
    for name in [".tmp-shard-1", ".tmp-other", "a.parquet"] {
        fs::write(out.join(name), "").unwrap();
    }
    Claim::take(&out).unwrap();
    let mut left: Vec<_> =
        fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".lock", ".tmp-other", "a.parquet"]);
}

#[test]
fn a_link_that_leads_nowhere_has_not_vanished() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    at(folder.path(), "a.parquet", 1);
    at(folder.path(), "whole", 0);
    std::os::unix::fs::symlink("whole", path("g.parquet")).unwrap();
    std::os::unix::fs::symlink("z.parquet", path("z.parquet")).unwrap();
    let mut follow = Follow::new(folder.path());
    let due = follow.due(&|_| false, &|_| false).unwrap();
    assert_eq!(names(&due), ["g.parquet", "a.parquet", "z.parquet"]);
    let whole = due[0].clone();
    fs::remove_file(path("whole")).unwrap();
    let due = follow.due(&|_| false, &|_| false).unwrap();
    assert_eq!(names(&due), ["a.parquet", "g.parquet", "z.parquet"]);
    assert!(due[1].stamp != whole.stamp && due.iter().all(|shard| !shard.is_gone()));
    fs::remove_file(path("g.parquet")).unwrap();
    assert!(whole.is_gone());
}
