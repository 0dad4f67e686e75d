//! Places that `oclaw forget` does not look into, or cannot clean, are told.

use oclaw::table::Format;
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

use super::{SECRET, forget, rows, telling};
use crate::forge::{captured, write};

/// What is not looked into is told, and keeps nothing else from being removed.
#[test]
fn places_not_looked_into_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let table = |name: &str| {
        let rows = [telling("gone", 1), captured("stays", 1)];
        write(&at(name), Format::Parquet, &[Writer::Serve], &rows);
    };
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
    for name in ["run/turns", "run/judged", "run/copies", "elsewhere"] {
        std::fs::create_dir_all(at(name)).unwrap();
    }
    table("run/turns/a.parquet");
    table("elsewhere/a.parquet");
    link("../../elsewhere/a.parquet", "run/judged/a.parquet");
    link("../elsewhere", "run/folder");
    link("../absent/a.parquet", "run/broken");
    // These lead to what is seen anyway.
    link("turns", "run/latest");
    link("a.parquet", "run/turns/b.parquet");
    let whole = std::fs::read(at("run/turns/a.parquet")).unwrap();
    std::fs::write(at("run/judged/cut.parquet"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(at("run/report.html"), "<td title=\"session gone\">").unwrap();
    std::fs::write(at("run/other.html"), "foregone conclusions, gone-wrong").unwrap();
    std::fs::write(at("run/copies/old.jsonl.gz"), [0x1f, 0x8b, 8, 0]).unwrap();
    std::fs::write(at("run/copies/unnamed"), [0x28, 0xb5, 0x2f, 0xfd, 8, 0]).unwrap();

    let (code, told, talk) = forget(folder.path(), &["--session", "gone", "--in", "run"]);
    assert_eq!(code, Some(3), "{told}{talk}");
    for line in [
        "run/turns/a.parquet: 1 rows\n",
        "run/judged/a.parquet: left: a link to `../../elsewhere/a.parquet`, not followed: \
            give it to `--in` itself\n",
        "run/folder: left: a link to `../elsewhere`, not followed",
        "run/broken: left: a link to `../absent/a.parquet`, not followed",
        "run/judged/cut.parquet: left: cannot be searched (`run/judged/cut.parquet` is cut short",
        "run/report.html: left: ids of the turns or their session\n",
        "run/copies/old.jsonl.gz: left: compressed, not looked into\n",
        "run/copies/unnamed: left: compressed, not looked into\n",
    ] {
        assert!(told.contains(line), "{line}\n{told}");
    }
    for seen in ["run/latest", "run/turns/b.parquet", "run/other.html"] {
        assert!(!told.contains(seen), "{seen}\n{told}");
    }
    assert!(talk.lines().any(|line| line.split_whitespace().eq(["places", "left", "7"])), "{talk}");
    assert_eq!(rows(&at("run/turns/a.parquet")).len(), 1);

    // A link that is named itself is followed, whatever is left of the table.
    let (code, told, _) =
        forget(folder.path(), &["--session", "gone", "--in", "run/judged/a.parquet"]);
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(rows(&at("elsewhere/a.parquet")).len(), 1);
    write(&at("elsewhere/a.parquet"), Format::Parquet, &[Writer::Serve], &[telling("gone", 1)]);
    forget(folder.path(), &["--session", "gone", "--in", "run/judged/a.parquet"]);
    assert!(!at("elsewhere/a.parquet").exists());
}

#[test]
fn a_page_that_shows_the_words_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A page shows a text as HTML writes it, and may cut it.
    let long = format!("\"{SECRET}\" & <b>{}</b>", "so on ".repeat(200));
    let response = json!({"role": "assistant", "content": long}).to_string();
    let said = Turn { response, ..telling("said", 1) };
    write(&at("single.parquet"), Format::Parquet, &[Writer::Serve], &[said]);
    std::fs::write(
        at("page.html"),
        format!("<p>&quot;{SECRET}&quot; &amp; &lt;b&gt;{}…</p>", "so on ".repeat(40)),
    )
    .unwrap();
    let arguments = ["--session", "said", "--in", "single.parquet", "page.html"];
    let (code, told, _) = forget(folder.path(), &arguments);
    assert_eq!(code, Some(3));
    assert!(told.ends_with("page.html: left: words of the turns\n"), "{told}");
}

#[test]
fn that_nothing_was_found_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (code, told, talk) = forget(folder.path(), &["--session", "never", "--in", "."]);
    assert_eq!((code, told.as_str()), (Some(0), ""));
    let expected = "nothing of session `never` was found in what could be read\n";
    assert!(talk.starts_with(expected), "{talk}");
}

/// Nothing is looked for in a store, and nobody shall think that it was.
#[test]
fn a_store_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("a.parquet");
    write(&table, Format::Parquet, &[Writer::Serve], &[telling("gone", 1)]);
    let (code, told, talk) =
        forget(folder.path(), &["--session", "gone", "--in", "a.parquet", "s3://chats/run"]);
    assert_eq!((code, told.as_str()), (Some(2), ""));
    let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "`s3://chats/run` is an object store: turns are forgotten in files of this machine",
        "copy it to a folder, run this with `--in FOLDER`, then put back the files that changed \
            and delete those that are gone, there and in `--object-cache`",
    ] {
        assert!(talk.contains(words), "{talk}");
    }
    // Not even the half that could be done is.
    assert_eq!(rows(&table).len(), 1);
}
