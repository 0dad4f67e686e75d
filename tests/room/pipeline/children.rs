//! Which commands a loop is made of.

use std::time::Duration;

use oclaw::pipeline::{Child, Error, Plan, Run, Tier, Wishes, children};

fn cast(config: &str, without: &[&str]) -> Vec<Child> {
    cast_or_not(config, without).unwrap()
}

fn refused(config: &str) -> String {
    cast_or_not(config, &[]).unwrap_err().to_string()
}

fn cast_or_not(config: &str, without: &[&str]) -> Result<Vec<Child>, Error> {
    cast_at(Run::new("run"), config, without)
}

pub(super) fn cast_at(run: Run, config: &str, without: &[&str]) -> Result<Vec<Child>, Error> {
    let plan = Plan::parse(config, |_| Ok(Duration::from_secs(1))).unwrap();
    let wishes = Wishes {
        program: "oclaw".to_owned(),
        config: "oclaw.toml".to_owned(),
        run,
        without: without.iter().map(|stage| (*stage).to_owned()).collect(),
        weight_sync_interval: 2,
        train_when_idle: Some("10m".to_owned()),
        train_hours: vec!["22:00-06:00".to_owned()],
    };
    let given = |section: &str, key: &str| plan.value(section, key).map(str::to_owned);
    children(&plan, &wishes, &given)
}

fn words(children: &[Child], name: &str) -> String {
    let child = children.iter().find(|child| child.name == name).unwrap();
    child.argv.join(" ")
}

pub(super) const NODE: &str = r#"
[engines.policy]
command = ["sglang", "serve"]
url = "http://127.0.0.1:30001"
gpus = [0, 1, 2, 3]
[engines.prm]
model = "models/judge"
url = "http://127.0.0.1:30002"
serves = "judge"
gpus = [4, 5]
[engines.teacher]
url = "http://elsewhere:1"
serves = "teacher"
[train]
model = "models/base"
estimator = "opd"
gpus = [6, 7]
"#;

#[test]
fn a_node_with_three_engines() {
    let children = cast(NODE, &[]);
    let names: Vec<_> = children.iter().map(|child| child.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "engine-policy",
            "engine-prm",
            "engine-teacher",
            "serve",
            "judge",
            "hint",
            "teacher-lp",
            "advantage",
            "train",
            "sync-weights"
        ]
    );
    assert!(children.is_sorted_by_key(|child| child.tier));
    for (name, expected) in [
        ("engine-policy", "sglang serve"),
        (
            "engine-prm",
            "oclaw engine --config oclaw.toml --model models/judge --listen 127.0.0.1:30002",
        ),
        // Somebody else runs it.
        ("engine-teacher", ""),
        (
            "serve",
            "oclaw serve --config oclaw.toml --engine http://127.0.0.1:30001 \
             --listen 127.0.0.1:30000 --spool run/turns",
        ),
        (
            "judge",
            "oclaw judge --config oclaw.toml --follow run/turns -o run/judged \
             --engine http://127.0.0.1:30002",
        ),
        (
            "hint",
            "oclaw hint --config oclaw.toml --follow run/judged -o run/hinted \
             --engine http://127.0.0.1:30002",
        ),
        (
            "teacher-lp",
            "oclaw teacher-lp --config oclaw.toml --follow run/hinted -o run/taught \
             --engine http://elsewhere:1 --tokenizer models/base --topk 0",
        ),
        (
            "advantage",
            "oclaw advantage --config oclaw.toml --follow run/taught -o run/ready --estimator opd",
        ),
        (
            "train",
            "oclaw train --config oclaw.toml --follow run/ready --out run/policy \
             --metrics run/metrics.jsonl --when-idle 10m --spool run/turns --hours 22:00-06:00",
        ),
        (
            "sync-weights",
            "oclaw sync-weights --config oclaw.toml --follow run/policy \
             --engine http://127.0.0.1:30001 --proxy http://127.0.0.1:30000 --every 2",
        ),
    ] {
        assert_eq!(words(&children, name), expected, "{name}");
    }
    let of = |name: &str| children.iter().find(|child| child.name == name).unwrap();
    assert_eq!(of("train").process.gpus, [6, 7]);
    // Who has no device where others have sees none.
    assert_eq!(of("judge").process.env["CUDA_VISIBLE_DEVICES"], "");
    assert!(!of("train").process.env.contains_key("CUDA_VISIBLE_DEVICES"));
    assert!(of("engine-policy").vital && of("serve").vital && !of("engine-prm").vital);
    assert_eq!(of("serve").ready.as_ref().unwrap().0, "http://127.0.0.1:30000/readyz");
    assert_eq!(of("serve").tier, Tier::Serve);
}

#[test]
fn one_process_serves_and_what_is_left_out_is_passed_over() {
    let config = "[serve]\nmodel = \"m\"\nlisten = \"0.0.0.0:8000\"\n[judge]\nrules = \"\"\n\
                  [advantage]\nestimator = \"grpo\"\n";
    let children = cast(config, &["hint", "teacher-lp", "sync-weights"]);
    let serve = "oclaw serve --config oclaw.toml --model m --engine-listen 127.0.0.1:30001 \
                 --listen 0.0.0.0:8000 --spool run/turns";
    assert_eq!(words(&children, "serve"), serve);
    let advantage = "oclaw advantage --config oclaw.toml --follow run/judged -o run/ready";
    assert_eq!(words(&children, "advantage"), advantage);
    assert!(words(&children, "train").contains("--estimator grpo --model m --when-idle"));
    assert_eq!(children.len(), 4);
    let front = children.iter().find(|child| child.name == "serve").unwrap();
    assert_eq!(front.ready.as_ref().unwrap().0, "http://127.0.0.1:8000/readyz");
    assert!(children.iter().all(|child| child.process.env.is_empty()));
}

/// An engine that is started anew begins with the newest policy, unless that has to pass
/// a gate, goes beside the model, is not handed over, or is in a store.
#[test]
fn an_engine_begins_with_the_newest_policy() {
    let base = "[engines.a]\nmodel = \"m\"\n[engines.b]\nmodel = \"n\"\nserves = \"judge\"\n\
                url = \"http://127.0.0.1:2\"\n[hint]\nfrom-feedback = true\n";
    let plain = "oclaw engine --config oclaw.toml --model m --listen 127.0.0.1:30001";
    let begins = format!("{plain} --policies run/policy");
    let children = cast(base, &[]);
    assert_eq!(words(&children, "engine-a"), begins);
    assert!(!words(&children, "engine-b").contains("--policies"));
    assert_eq!(words(&cast(base, &["sync-weights"]), "engine-a"), plain);
    for setting in [
        "[sync-weights]\nrequire-gate = true\n",
        "[sync-weights]\nenv = { OCLAW_SYNC_WEIGHTS_REQUIRE_GATE = \"true\" }\n",
        "[sync-weights]\nadapter = true\n",
        "[engine]\nweight-version = \"3\"\n",
    ] {
        let children = cast(&format!("{base}{setting}"), &[]);
        assert_eq!(words(&children, "engine-a"), plain, "{setting}");
    }
    let run = Run::new("run").with_store(Some("s3://chats/run".to_owned()));
    let children = cast_at(run, base, &[]).unwrap();
    assert!(!words(&children, "engine-a").contains("--policies"));
}

/// Whoever pushes weights needs a key that serve takes, and is told which.
#[test]
fn the_key_of_serve_is_passed_on() {
    let base = "[engines.policy]\nmodel = \"m\"\nurl = \"http://127.0.0.1:30001\"\n\
                [judge]\nrules = \"\"\n[hint]\nfrom-feedback = true\n";
    let sync = |rest: &str| words(&cast(&format!("{base}{rest}"), &[]), "sync-weights");
    let told = |rest: &str| {
        let words = sync(rest);
        let file = words.split_once("--proxy-key-file ").map(|(_, rest)| rest.to_owned());
        file.map(|rest| rest.split(' ').next().unwrap().to_owned())
    };
    let both = "[serve]\nkey-file = \"a\"\ncontrol-key-file = \"b\"\n";
    assert_eq!(told(""), None);
    assert_eq!(told("[serve]\nkey-file = \"a\"\n").as_deref(), Some("a"));
    assert_eq!(told(both).as_deref(), Some("b"));
    for own in [
        "[sync-weights]\nproxy-key-file = \"c\"\n",
        "[sync-weights]\nproxy = \"http://elsewhere:1\"\n",
        "[sync-weights]\nenv = { OCLAW_SYNC_WEIGHTS_PROXY_KEY = \"k\" }\n",
    ] {
        assert_eq!(told(&format!("{both}{own}")), None, "{own}");
    }
}

/// Several engines share the chats, unless a router before them gets these; each of
/// them gets the weights.
#[test]
fn several_engines_share_a_policy() {
    let two = "[engines.a]\nurl = \"http://a:1\"\n[engines.b]\nurl = \"http://b:1\"\n\
               [train]\nmodel = \"m\"\n[judge]\nrules = \"\"\n[hint]\nfrom-feedback = true\n";
    let routed = format!("{two}[serve]\nengine = \"http://router:1\"\n");
    for (config, engines) in
        [(two, "--engine http://a:1 --engine http://b:1"), (&routed, "--engine http://router:1")]
    {
        let children = cast(config, &[]);
        let serve = format!(
            "oclaw serve --config oclaw.toml {engines} --listen 127.0.0.1:30000 --spool run/turns"
        );
        assert_eq!(words(&children, "serve"), serve);
        let sync = "oclaw sync-weights --config oclaw.toml --follow run/policy --engine \
                    http://a:1 --engine http://b:1 --proxy http://127.0.0.1:30000 --every 2";
        assert_eq!(words(&children, "sync-weights"), sync);
        let engines = children.iter().filter(|child| child.tier == Tier::Engine && child.vital);
        assert_eq!(engines.count(), 2);
    }
    let error = refused(&format!("{two}[serve]\nmodel = \"m\"\n"));
    assert!(error.contains("`[serve]` has an engine of its own"), "{error}");
}

/// A process is taken up only if it would be started the same way again.
#[test]
fn other_settings_make_another_process() {
    let digest = |config: &str, name: &str| {
        cast(config, &[]).into_iter().find(|child| child.name == name).unwrap().digest
    };
    let longer = format!("{NODE}\n[serve]\nsession-idle = \"5m\"\n");
    assert_ne!(digest(NODE, "serve"), digest(&longer, "serve"));
    assert_eq!(digest(NODE, "judge"), digest(&longer, "judge"));
    let seeded = format!("seed = 3\n{NODE}");
    assert_ne!(digest(NODE, "engine-prm"), digest(&seeded, "engine-prm"));
}

/// The spool stays where it is; the way of a turn from there is that of the folders.
#[test]
fn stages_meet_in_a_store() {
    let run = || Run::new("run").with_store(Some("s3://chats/run/".to_owned()));
    let config = format!("{NODE}[judge]\nrules = \"\"\n[hint]\nfrom-feedback = true\n");
    let children = cast_at(run(), &config, &[]).unwrap();
    for (name, told) in [
        ("serve", "--spool run/turns --ship s3://chats/run/turns"),
        ("judge", "--follow s3://chats/run/turns -o s3://chats/run/judged"),
        ("hint", "--follow s3://chats/run/judged -o s3://chats/run/hinted"),
        ("teacher-lp", "--follow s3://chats/run/hinted -o s3://chats/run/taught"),
        ("advantage", "--follow s3://chats/run/taught -o s3://chats/run/ready"),
        ("train", "--follow s3://chats/run/ready --out s3://chats/run/policy"),
        ("train", "--metrics run/metrics.jsonl"),
        ("train", "--spool run/turns"),
        ("sync-weights", "--follow s3://chats/run/policy"),
        ("judge", "--object-cache run/objects"),
    ] {
        let words = words(&children, name);
        assert!(words.contains(told), "{told}: {words}");
    }
    let own = format!("object-cache = \"/fast\"\n{config}");
    let children = cast_at(run(), &own, &[]).unwrap();
    assert!(!words(&children, "judge").contains("--object-cache"));
}

/// The likeliest tokens that `hybrid` learns from are those of the policies at hand, or of
/// the engine that serves the newest one; nobody tells any that nobody learns from.
#[test]
fn the_likeliest_tokens_are_told_where_they_are_learnt_from() {
    let local = "[engines.a]\nmodel = \"m\"\n[judge]\nrules = \"\"\n\
                 [hint]\nfrom-feedback = true\n";
    let server = format!("{local}[engines.t]\nurl = \"http://t:1\"\nserves = \"teacher\"\n");
    let store = Run::new("run").with_store(Some("s3://chats/run".to_owned()));
    let engine = "--student http://127.0.0.1:30001";
    for (run, config, rest, told) in [
        (Run::new("run"), local, "", "--model m --policy run/policy"),
        (Run::new("run"), local, "[train]\nestimator = \"topk-kl\"\n", "--policy run/policy"),
        (Run::new("run"), local, "[teacher-lp]\ntopk = 9\n", "--policy run/policy"),
        (Run::new("run"), local, "[train]\nestimator = \"combine\"\n", "--model m --topk 0"),
        (Run::new("run"), local, "[teacher-lp]\ntopk = 0\n", "--model m"),
        (Run::new("run"), local, "[teacher-lp]\nstudent = \"s\"\n", "--model m"),
        (Run::new("run"), &server, "", engine),
        (store.clone(), local, "", engine),
        (store, local, "[teacher-lp]\ntopk = 4\n", engine),
    ] {
        let children = cast_at(run, &format!("{config}{rest}"), &[]).unwrap();
        let words = words(&children, "teacher-lp");
        assert!(words.ends_with(told), "{rest}: {words}");
    }
}

/// What the loop says to its processes itself, the file cannot say otherwise.
#[test]
fn a_setting_without_a_say_is_refused() {
    let base = "[engines.a]\nmodel = \"m\"\n[judge]\nrules = \"\"\n\
                [hint]\nfrom-feedback = true\n";
    for (setting, told) in [
        ("[serve]\nspool = \"s\"", "line 8: `[serve] spool` has no effect in a loop: turns go to"),
        ("[serve]\nengine-listen = \"a:1\"", "`[serve] engine-listen` has no effect in a loop: no"),
        ("[teacher-lp]\nfollow = \"f\"", "`[teacher-lp] follow` has no effect in a loop: stages"),
        (
            "[advantage]\noutput = \"o\"",
            "`[advantage] output` has no effect in a loop: stages meet",
        ),
        (
            "[advantage]\nreplace = true",
            "`[advantage] replace` has no effect in a loop: a stage of",
        ),
        (
            "[train]\nonce = true",
            "`[train] once` has no effect in a loop: a stage of a loop goes on",
        ),
        ("[train]\nout = \"p\"", "`[train] out` has no effect in a loop: policies go to `policy`"),
        ("[train]\nmetrics = \"m\"", "`[train] metrics` has no effect in a loop: they go to"),
        (
            "[train]\nwhen-idle = \"1m\"",
            "has no effect in a loop: `[loop] train-when-idle` says it",
        ),
        ("[train]\nhours = \"1\"", "has no effect in a loop: `[loop] train-hours` says it"),
        (
            "[sync-weights]\nevery = 4",
            "has no effect in a loop: write `[loop] weight-sync-interval`",
        ),
        (
            "[sync-weights]\nforce = true",
            "`[sync-weights] force` has no effect in a loop: it is about",
        ),
        (
            "[engine]\nmodel = \"m\"",
            "`[engine] model` has no effect in a loop: an engine of a loop",
        ),
        (
            "[engine]\npolicies = \"p\"",
            "`[engine] policies` has no effect in a loop: an engine that serves",
        ),
        (
            "[train]\nenv = { OCLAW_TRAIN_OUT = \"p\" }",
            "line 8: `OCLAW_TRAIN_OUT` in `[train] env` has no effect in a loop: policies go",
        ),
    ] {
        let said = refused(&format!("{base}{setting}\n"));
        assert!(said.contains(told), "{setting}: {said}");
    }
    // A stage that does not run is nobody's.
    let settings = format!("{base}[sync-weights]\nevery = 4\n");
    assert!(cast_or_not(&settings, &["sync-weights"]).is_ok());
    // A model that is served inside has an address; `oclaw engine` is no part of that loop.
    let inside = "[serve]\nmodel = \"m\"\nengine-listen = \"127.0.0.1:1\"\n\
                  [engine]\nmodel = \"m\"\n[judge]\nrules = \"\"\n\
                  [hint]\nfrom-feedback = true\n";
    assert!(words(&cast(inside, &[]), "serve").contains("--engine-listen 127.0.0.1:1"));
}
