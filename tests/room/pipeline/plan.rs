//! What a configuration file asks of the loop.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use oclaw::pipeline::{Kind, Origin, Plan, Serves};

fn time(text: &str) -> Result<Duration, String> {
    let minutes = text.strip_suffix('m').ok_or_else(|| format!("no time: `{text}`"))?;
    Ok(Duration::from_secs(60 * minutes.parse::<u64>().map_err(|error| error.to_string())?))
}

fn parse(text: &str) -> Plan {
    Plan::parse(text, time).unwrap()
}

const NODE: &str = r#"
seed = 7

[loop]
without = ["hint"]

[engines.policy]
command = ["python3", "-m", "sglang.launch_server", "--port", "30001"]
url = "http://127.0.0.1:30001/"
gpus = [0, 1, 2, 3]
ready-timeout = "20m"

[engines.prm]
model = "models/judge"
url = "http://127.0.0.1:30002"
serves = "judge"
gpus = [4, 5]
env = { OMP_NUM_THREADS = 4 }

[engines.gateway]
url = "https://gateway.example/v1"
serves = "teacher"

[train]
lr = 1e-6
gpus = [6, 7]

[train.env]
NCCL_DEBUG = "WARN"

[scheduler]
kind = "slurm"
partition = "gpu"
args = ["--time=24:00:00"]
poll = "2m"
"#;

#[test]
fn a_node_is_read_whole() {
    let plan = parse(NODE);
    let policy = &plan.engines["policy"];
    assert_eq!(policy.url, "http://127.0.0.1:30001");
    assert_eq!(policy.serves, Serves::Policy);
    assert_eq!(policy.ready_timeout, Duration::from_secs(1200));
    assert_eq!(policy.process.gpus, [0, 1, 2, 3]);
    assert!(matches!(&policy.origin, Origin::Command(words) if words.len() == 5));
    let prm = &plan.engines["prm"];
    assert_eq!(prm.origin, Origin::Model(Path::new("models/judge").to_owned()));
    assert_eq!(prm.process.env["OMP_NUM_THREADS"], "4");
    assert_eq!(plan.engines["gateway"].origin, Origin::Elsewhere);
    let teachers: Vec<_> = plan.engines_for(Serves::Teacher).map(|(name, _)| name).collect();
    assert_eq!(teachers, ["gateway"]);
    assert_eq!(plan.processes["train"].gpus, [6, 7]);
    assert_eq!(plan.processes["train"].env["NCCL_DEBUG"], "WARN");
    assert_eq!(plan.value("train", "lr"), Some("1e-6"));
    assert_eq!(plan.value("train", "gpus"), None);
    assert_eq!(plan.value("", "seed"), Some("7"));
    assert_eq!(plan.values("loop", "without").unwrap(), ["hint"]);
    assert_eq!(plan.scheduler.kind, Kind::Slurm);
    assert_eq!(plan.scheduler.args, ["--time=24:00:00"]);
    assert_eq!(plan.scheduler.poll, Some(Duration::from_secs(120)));
    assert_eq!(parse("").scheduler.kind, Kind::Local);
}

#[test]
fn what_is_wrong_has_its_line() {
    for (text, told) in [
        (
            "[engines.a]\nmodl = \"m\"",
            "line 2: no setting `modl` in `[engines.a]`; settings are `command`, `env`, `gpus`, `model`, `ready-timeout`, `serves`, `url`",
        ),
        (
            "[engines.a]\nmodel = \"m\"\ncommand = [\"x\"]",
            "line 3: an engine has a `model` or a `command`, not both",
        ),
        ("\n[engines.a]\ncommand = [\"x\"]", "line 2: `[engines.a]` needs a `url`"),
        (
            "[engines.a]\nmodel = \"m\"\n[engines.b]\nmodel = \"n\"",
            "line 3: `[engines.b]` has the `url` of `[engines.a]`",
        ),
        (
            "[engines.a]\nurl = \"me:secret@localhost:1\"",
            "line 2: `url` is to be `http://HOST:PORT`, not `…@localhost:1`",
        ),
        (
            "[engines.a]\nurl = \"localhost:1\"",
            "line 2: `url` is to be `http://HOST:PORT`, not `localhost:1`",
        ),
        (
            "[engines.a]\nurl = \"http://a\"\ngpus = [1]",
            "line 3: somebody else runs an engine without `model` and `command`: its devices and variables are not ours to give",
        ),
        (
            "[engines.a]\nserves = \"tea\"",
            "line 2: an engine serves `policy`, `judge` or `teacher`, not `tea`",
        ),
        (
            "[engines.a]\nmodel = \"m\"\nready-timeout = \"soon\"",
            "line 3: `ready-timeout`: no time: `soon`",
        ),
        ("[engines]\na = 1", "line 2: `engines.a` is to be a section `[engines.a]`"),
        (
            "[engines.\"a b\"]\nmodel = \"m\"",
            "line 1: an engine's name has letters, digits, `-` and `_`: `a b`",
        ),
        ("engines = 1", "line 1: `engines` is a section"),
        ("[train]\ngpus = 3", "line 2: `gpus` is to be a list of device numbers, as in `[4, 5]`"),
        (
            "[train]\ngpus = [-1]",
            "line 2: `gpus` is to be a list of device numbers, as in `[4, 5]`",
        ),
        ("[train]\ngpus = [1, 1]", "line 2: `gpus` has device 1 twice"),
        (
            "[train]\nenv = [\"A=b\"]",
            "line 2: `env` is to be a table, as in `{ NAME = \"value\" }`",
        ),
        (
            "[train.env]\nCUDA_VISIBLE_DEVICES = \"1\"",
            "line 2: `CUDA_VISIBLE_DEVICES` comes from `gpus`",
        ),
        ("[judge]\nvotes = { a = 1 }", "line 2: `judge.votes` has a type that no flag takes"),
        ("[view]\nenv = { a = 1 }", "line 2: `view.env` has a type that no flag takes"),
        (
            "[scheduler]\nkind = \"pbs\"",
            "line 2: no scheduler `pbs`; there are `local`, `ray`, `slurm`",
        ),
        (
            "[scheduler]\nkind = \"ray\"\npartition = \"x\"",
            "line 3: this kind of scheduler has no `partition`",
        ),
        ("[scheduler]\npoll = \"1m\"", "line 2: this kind of scheduler has no `poll`"),
        (
            "[scheduler]\nport = 1",
            "line 2: no setting `port` in `[scheduler]`; settings are `address`, `args`, `kind`, `partition`, `poll`",
        ),
    ] {
        assert_eq!(Plan::parse(text, time).unwrap_err().to_string(), told, "{text}");
    }
}

#[test]
fn devices_are_there_and_given_once() {
    let check = |text: &str, present: &[u32]| {
        let present: BTreeSet<u32> = present.iter().copied().collect();
        let checked = parse(text).check_devices(&present, &["hint".to_owned()]);
        checked.err().map(|error| error.to_string())
    };
    let two = "[engines.a]\nmodel = \"m\"\ngpus = [0, 1]\n[train]\ngpus = [1]";
    let shared = "line 5: `[train]` has device 1 of `[engines.a]`";
    assert_eq!(check(two, &[0, 1]).as_deref(), Some(shared));
    let one = "[train]\ngpus = [2]";
    let absent = "line 2: `[train]` has no device 2: there are 0, 1";
    assert_eq!(check(one, &[0, 1]).as_deref(), Some(absent));
    let none = "line 2: `[train]` has no device 2: there is none";
    assert_eq!(check(one, &[]).as_deref(), Some(none));
    assert_eq!(check(one, &[2]), None);
    // Who does not run takes none; on a cluster they have no numbers.
    assert_eq!(check("[hint]\ngpus = [9]", &[0]), None);
    assert_eq!(check(&format!("{two}\n[scheduler]\nkind = \"ray\""), &[]), None);
}
