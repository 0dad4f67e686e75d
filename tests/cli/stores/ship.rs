//! `serve --ship`: finished shards go to the store, whenever it is there.

use super::{Cloud, Running, talk};
use crate::harness::fake_engine::FakeEngine;
use crate::harness::fake_s3::FakeS3;

#[test]
fn finished_shards_are_shipped_and_stay() {
    let (fake, engine) = (FakeS3::start(), FakeEngine::sglang());
    let cloud = Cloud::new(&fake.endpoint);
    let spool = cloud.here.path().join("spool");
    std::fs::create_dir(&spool).unwrap();
    let write = |name: &str, bytes: Vec<u8>| std::fs::write(spool.join(name), bytes).unwrap();
    write("a.parquet", cloud.shard("a", 100, 1));
    write(".tmp-x.parquet", Vec::new());
    let engine = engine.url();
    let words = ["serve", "--engine", &engine, "--listen", "127.0.0.1:0", "--spool", "spool"];
    let serve = |url: &str| {
        let mut command = cloud.command(&words);
        command.args(["--ship", url]);
        command
    };
    // A store that is away holds up nobody.
    fake.say(503);
    let mut serving = Running::start(&serve("s3://bucket/turns"));
    serving.hears("ready: ");
    serving.hears("the store is away");
    fake.say(0);
    serving.hears("is there again");
    let (code, said) = serving.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(fake.names(), ["turns/a.parquet"]);
    let shipped = fake.get("turns/a.parquet").unwrap();
    assert_eq!(shipped, std::fs::read(spool.join("a.parquet")).unwrap());

    // What is there already is not sent again; what is left at the end is.
    write("b.parquet", cloud.shard("b", 200, 1));
    let mut serving = Running::start(&serve("s3://bucket/turns"));
    serving.hears("ready: ");
    let (code, said) = serving.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(fake.names(), ["turns/a.parquet", "turns/b.parquet"]);
    let sent = fake.asked().iter().filter(|it| it.starts_with("PUT /bucket/turns/a")).count();
    assert_eq!(sent, 1);
    let ran = serve("elsewhere").assert().code(2);
    assert!(talk(ran.get_output()).contains("`--ship elsewhere` is no object store"));
}
