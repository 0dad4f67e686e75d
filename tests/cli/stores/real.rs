//! A real S3-compatible server on loopback, of the package that `.ci/run`
//! installs (moto), which checks signatures' form and honours conditional writes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use oclaw::store::Error;

use super::{Cloud, read, talk};
use crate::harness::root;

pub(in crate::cli) struct Server {
    child: Child,
    pub(in crate::cli) endpoint: String,
}

impl Server {
    /// Starts one, if it is installed, with an empty bucket.
    #[expect(clippy::print_stdout, reason = "what is skipped is said")]
    pub(in crate::cli) fn start() -> Option<Self> {
        let packages = root().join("target/tools/moto");
        if !packages.join("moto").is_dir() {
            println!("skipped: no S3 server in target/tools/moto (`.ci/run` installs it)");
            return None;
        }
        let mut child = Command::new("python3")
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", "0"])
            .env("PYTHONPATH", packages)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut talk = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let endpoint = loop {
            let mut line = String::new();
            assert_ne!(talk.read_line(&mut line).unwrap(), 0, "{said}");
            if let Some((_, rest)) = line.split_once("Running on http://") {
                let address: String =
                    rest.chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
                break format!("http://{address}");
            }
            said.push_str(&line);
        };
        std::thread::spawn(move || talk.read_to_end(&mut Vec::new()));
        let server = Self { child, endpoint };
        let mut stream =
            TcpStream::connect(server.endpoint.strip_prefix("http://").unwrap()).unwrap();
        let make =
            "PUT /bucket HTTP/1.1\r\nhost: s3\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        stream.write_all(make.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        Some(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn a_real_server_takes_the_whole_way() {
    let Some(server) = Server::start() else { return };
    let cloud = Cloud::new(&server.endpoint);
    let runtime = runtime();
    let turns = cloud.store("turns");
    runtime.block_on(async {
        for (name, at) in [("b.parquet", 100), ("a.parquet", 200)] {
            turns.put_new(name, cloud.shard(name, at, 2).into()).await.unwrap();
        }
        let again = turns.put_new("a.parquet", "other".into()).await;
        assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
        // In parts, as weights are.
        let file = cloud.here.path().join("large");
        std::fs::write(&file, vec![7; 40 << 20]).unwrap();
        turns.upload("large", &file).await.unwrap();
        let large = turns.look("large").await.unwrap().unwrap();
        assert_eq!(large.size, 40 << 20);
        turns.delete("large").await.unwrap();
        assert_eq!(turns.look("large").await.unwrap(), None);
    });
    let ran = cloud.follow("judge", ("turns", "judged"), &["--rules", "--once"]).assert().success();
    let words = talk(ran.get_output());
    let (first, second) = (words.find("b.parquet: 2 rows"), words.find("a.parquet: 2 rows"));
    assert!(first.unwrap() < second.unwrap(), "{words}");
    let again = cloud.follow("judge", ("turns", "judged"), &["--rules", "--once"]).assert();
    assert!(talk(again.success().get_output()).ends_with("shards 0"));
    cloud
        .follow("advantage", ("judged", "ready"), &["--estimator", "grpo", "--once"])
        .assert()
        .success();
    let bytes = runtime.block_on(cloud.store("ready").read("a.parquet")).unwrap().unwrap();
    assert_eq!(read(&cloud, &bytes).0.len(), 2);
    cloud.command(&["view", "s3://bucket/ready"]).assert().success();
    #[cfg(feature = "torch")]
    policies(&cloud, &runtime);
}

/// Trains, and goes on from the store on another machine.
#[cfg(feature = "torch")]
fn policies(cloud: &Cloud, runtime: &tokio::runtime::Runtime) {
    use super::policies::{ready, training};
    runtime.block_on(async {
        let store = cloud.store("ready");
        for name in ["a.parquet", "b.parquet"] {
            store.delete(name).await.unwrap();
        }
        store.put_new("c.parquet", ready(cloud, "c", 6).into()).await.unwrap();
    });
    training(cloud, &["--once"]).assert().success();
    let other = Cloud::new(&cloud.endpoint);
    let ran = training(&other, &["--once"]).assert().success();
    let words = talk(ran.get_output());
    assert!(words.contains("going on from s3://bucket/policy/step-000002"), "{words}");
    assert!(words.contains("6 turns, 6 of them in the ledger"), "{words}");
}
