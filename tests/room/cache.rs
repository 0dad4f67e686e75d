//! The file of answers: keys, several processes' worth of connections, damage.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use oclaw::cache::{Cache, Error, Key, Question};
use serde_json::json;

fn key(number: u32) -> Key {
    Question::new("judge", &json!("m"), &json!({"a": 1})).vote(number)
}

/// Keeps an answer and waits until it is stored.
fn keep(cache: &Cache, key: Key, kind: &str, answer: &str) -> Result<(), Error> {
    let (sender, stored) = mpsc::channel();
    cache.put(key, kind, answer.to_owned(), move |outcome| sender.send(outcome).unwrap());
    stored.recv().unwrap()
}

#[test]
fn every_part_of_a_question_counts() {
    let question = |kind: &str, engine: &str, request: &str| {
        let value = |text: &str| serde_json::from_str(text).unwrap();
        Question::new(kind, &value(engine), &value(request))
    };
    let asked = question("judge", r#"{"m":1,"d":2}"#, r#"{"x":[1,{"b":2,"a":"\n"}]}"#);
    let same = question("judge", r#"{"d":2,"m":1}"#, r#"{"x":[1,{"a":"\n","b":2}]}"#);
    assert_eq!(asked.vote(0), same.vote(0));
    for other in [
        question("hint", r#"{"m":1,"d":2}"#, r#"{"x":[1,{"b":2,"a":"\n"}]}"#),
        question("judge", r#"{"m":1,"d":3}"#, r#"{"x":[1,{"b":2,"a":"\n"}]}"#),
        question("judge", r#"{"m":1,"d":2}"#, r#"{"x":[{"b":2,"a":"\n"},1]}"#),
        question("judge", r#"{"m":1,"d":2}"#, r#"{"x":[1,{"b":2,"a":"n"}]}"#),
        question("judge", r#"{"m":1,"d":2}"#, r#"{"x":[1,{"b":"2","a":"\n"}]}"#),
    ] {
        assert_ne!(asked.vote(0), other.vote(0));
    }
    assert_ne!(asked.vote(0), asked.vote(1));
    // The same parts, cut elsewhere.
    assert_ne!(question("a", "1", "23").vote(4), question("a", "12", "3").vote(4));
    assert_ne!(question("a", "1", "2").vote(34), question("a", "1", "23").vote(4));
}

#[test]
fn kept_answers_are_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/er/answers.sqlite");
    let cache = Cache::open(&path).unwrap();
    assert_eq!(cache.get(&key(0)).unwrap(), None);
    keep(&cache, key(0), "judge", r#"{"text":"1"}"#).unwrap();
    // Without waiting: the end of the cache waits.
    cache.put(key(1), "hint", "22".to_owned(), |_| {});
    drop(cache);
    let cache = Cache::open(&path).unwrap();
    assert_eq!(cache.get(&key(0)).unwrap().as_deref(), Some(r#"{"text":"1"}"#));
    assert_eq!(cache.get(&key(1)).unwrap().as_deref(), Some("22"));
    keep(&cache, key(0), "judge", "other").unwrap();
    assert_eq!(cache.get(&key(0)).unwrap().as_deref(), Some("other"));

    let groups = cache.groups(&[Duration::from_secs(3600)]).unwrap();
    let told: Vec<_> =
        groups.iter().map(|g| (g.kind.as_str(), g.age, g.entries, g.bytes)).collect();
    assert_eq!(told, [("hint", 0, 1, 2), ("judge", 0, 1, 5)]);
    assert_eq!(cache.groups(&[Duration::ZERO]).unwrap()[0].age, 1);
    assert_eq!(cache.prune(Duration::from_secs(3600)).unwrap(), 0);
    assert_eq!(cache.prune(Duration::ZERO).unwrap(), 2);
    assert_eq!(cache.get(&key(0)).unwrap(), None);
    keep(&cache, key(2), "judge", "3").unwrap();
    assert_eq!(cache.clear().unwrap(), 1);
    assert_eq!(cache.groups(&[]).unwrap(), []);
}

#[test]
fn removal_gives_the_space_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.sqlite");
    let cache = Cache::open(&path).unwrap();
    let answer = "x".repeat(100_000);
    for number in 0..20 {
        keep(&cache, key(number), "judge", &answer).unwrap();
    }
    cache.clear().unwrap();
    drop(cache);
    let length = std::fs::metadata(&path).unwrap().len();
    assert!(length < 100_000, "{length} bytes of nothing");
}

/// Four openers of one file that is not there yet write and read at once.
#[test]
fn many_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.sqlite");
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let cache = Cache::open(path).unwrap();
                for number in 0..500 {
                    let number = writer * 500 + number;
                    cache.put(key(number), "judge", number.to_string(), |outcome| {
                        outcome.unwrap();
                    });
                    cache.get(&key(number / 2)).unwrap();
                }
            });
        }
    });
    let cache = Cache::open(&path).unwrap();
    for number in 0..2000 {
        assert_eq!(cache.get(&key(number)).unwrap(), Some(number.to_string()));
    }
}

fn damaged_names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.contains(".damaged-")).collect();
    names.sort();
    names
}

#[test]
fn damage_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.sqlite");
    // Ours by the lock file that stands beside it.
    drop(Cache::open(&path).unwrap());
    for ending in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(folder.path().join(format!("answers.sqlite{ending}")));
    }
    std::fs::write(&path, "not a database, but long enough to be looked at ".repeat(40)).unwrap();
    assert!(matches!(Cache::open(&path), Err(Error::Damaged { .. })));
    let opened = Cache::open_or_renew(&path).unwrap();
    let (aside, _) = opened.set_aside.unwrap();
    assert!(std::fs::read_to_string(aside).unwrap().starts_with("not a database"));
    for number in 0..200 {
        keep(&opened.cache, key(number), "judge", &"answer ".repeat(100)).unwrap();
    }
    drop(opened.cache);

    // Cut in the middle, as a full disk or a bad copy leaves it.
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let opened = Cache::open_or_renew(&path);
    let found = opened.and_then(|opened| match opened.set_aside {
        Some(_) => Ok(None),
        None => (0..200).try_for_each(|number| opened.cache.get(&key(number)).map(drop)).map(Some),
    });
    assert!(matches!(found, Ok(None) | Err(Error::Damaged { .. })), "{found:?}");

    // A page of zeroes in the middle: found when it is read.
    let mut zeroed = bytes.clone();
    zeroed[4096..4096 * 4].fill(0);
    std::fs::write(&path, &zeroed).unwrap();
    let opened = Cache::open_or_renew(&path).unwrap();
    if opened.set_aside.is_none() {
        let read = (0..200).try_for_each(|number| opened.cache.get(&key(number)).map(drop));
        assert!(matches!(read, Err(Error::Damaged { .. })), "{read:?}");
        opened.cache.set_aside().unwrap();
    }
    assert!(damaged_names(folder.path()).len() >= 2);
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("theirs.sqlite");
    let theirs = rusqlite::Connection::open(&path).unwrap();
    theirs.execute_batch("CREATE TABLE precious (x)").unwrap();
    assert!(matches!(Cache::open_or_renew(&path), Err(Error::Foreign { .. })));
    assert!(matches!(Cache::open_or_renew(folder.path()), Err(Error::Unusable { .. })));

    // Nothing is made beside them, and nothing in them changes.
    let notes = folder.path().join("notes.txt");
    std::fs::write(&notes, "precious notes").unwrap();
    for open in [Cache::open(&notes).err(), Cache::open_or_renew(&notes).err()] {
        assert!(matches!(open, Some(Error::Foreign { what: "no database", .. })), "{open:?}");
    }
    let empty = folder.path().join("no-tables.sqlite");
    let theirs = rusqlite::Connection::open(&empty).unwrap();
    theirs.pragma_update(None, "user_version", 3).unwrap();
    drop(theirs);
    let before = std::fs::read(&empty).unwrap();
    assert!(matches!(Cache::open_or_renew(&empty), Err(Error::Foreign { .. })));
    assert_eq!(std::fs::read(&empty).unwrap(), before);
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "precious notes");
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().collect();
    assert_eq!(names.len(), 3, "{names:?}");

    // A file of ours that was copied without its lock file is still ours.
    let path = folder.path().join("ours.sqlite");
    let ours = Cache::open(&path).unwrap();
    keep(&ours, key(1), "judge", "kept").unwrap();
    ours.clear().unwrap();
    drop(ours);
    let copied = folder.path().join("copied.sqlite");
    std::fs::copy(&path, &copied).unwrap();
    drop(Cache::open(&copied).unwrap());
    std::fs::write(folder.path().join("new.sqlite"), "").unwrap();
    drop(Cache::open(&folder.path().join("new.sqlite")).unwrap());

    let path = folder.path().join("newer.sqlite");
    drop(Cache::open(&path).unwrap());
    let newer = rusqlite::Connection::open(&path).unwrap();
    newer.pragma_update(None, "user_version", 9).unwrap();
    assert!(matches!(Cache::open_or_renew(&path), Err(Error::Newer { found: 9, .. })));
    assert_eq!(damaged_names(folder.path()), Vec::<String>::new());
}
