//! `oclaw check`: what each of its lines finds.

mod engines;
mod machine;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::harness::{fixture_models, oclaw};

/// A loop that could run here: the tiny model, rules, the person's own words.
struct Bench {
    folder: tempfile::TempDir,
    engine: u16,
    front: u16,
}

/// What a check ended with.
struct Outcome {
    code: i32,
    findings: Vec<Value>,
    talk: String,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Bench {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), engine: free_port(), front: free_port() }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn model() -> PathBuf {
        fixture_models().join("tiny-qwen3")
    }

    /// Copies the tiny model to a folder of its own.
    fn copy_model(&self, name: &str) -> PathBuf {
        let folder = self.path().join(name);
        fs::create_dir(&folder).unwrap();
        for entry in fs::read_dir(Self::model()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        folder
    }

    /// The sections of an engine with a model, by its folder.
    fn with_model(&self, model: &Path) -> String {
        let Self { engine, front, .. } = self;
        format!(
            "[engines.policy]\nmodel = {:?}\nurl = \"http://127.0.0.1:{engine}\"\n\
             [serve]\nlisten = \"127.0.0.1:{front}\"\n{RULES}",
            model.display().to_string()
        )
    }

    fn well(&self) -> String {
        self.with_model(&Self::model())
    }

    /// The sections of an engine that somebody else runs.
    fn elsewhere(&self, url: &str) -> String {
        let Self { front, .. } = self;
        format!(
            "[engines.policy]\nurl = \"{url}\"\n[serve]\nlisten = \"127.0.0.1:{front}\"\n\
             [train]\nmodel = {:?}\n{RULES}",
            Self::model().display().to_string()
        )
    }

    fn check(&self, text: &str, words: &[&str]) -> Outcome {
        self.check_with(text, words, &[])
    }

    fn check_with(&self, text: &str, words: &[&str], env: &[(&str, &str)]) -> Outcome {
        fs::write(self.path().join("oclaw.toml"), text).unwrap();
        let mut command = oclaw();
        command.args(["check", "--json"]).args(words).current_dir(self.path());
        command.envs(env.iter().copied());
        Outcome::of(&command.output().unwrap())
    }
}

const RULES: &str = "[judge]\nrules = \"\"\n[hint]\nfrom-feedback = true\n";

impl Outcome {
    fn of(output: &std::process::Output) -> Self {
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        Self {
            code: output.status.code().unwrap(),
            findings: text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
            talk: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }

    /// Asserts how it ended, and that a line of a check says so much.
    #[track_caller]
    fn says(&self, code: i32, check: &str, result: &str, words: &[&str]) -> &Self {
        let Self { findings, talk, .. } = self;
        assert_eq!(self.code, code, "{findings:#?}\n{talk}");
        let fits = |finding: &&Value| {
            let text = format!("{} {} {}", finding["subject"], finding["found"], finding["remedy"]);
            let text = text.replace("\\\"", "\"");
            finding["check"] == check
                && finding["result"] == result
                && words.iter().all(|word| text.contains(word))
        };
        assert!(findings.iter().any(|it| fits(&it)), "{check} {result} {words:?}: {findings:#?}");
        self
    }
}

#[test]
fn a_loop_that_can_run_passes() {
    let bench = Bench::new();
    let outcome = bench.check(&bench.well(), &[]);
    let checks: Vec<&str> =
        outcome.findings.iter().map(|it| it["check"].as_str().unwrap()).collect();
    for check in ["settings", "estimator", "devices", "model", "tokenizer", "port", "disk"] {
        assert!(checks.contains(&check), "{check}: {checks:?}");
    }
    outcome
        .says(0, "settings", "ok", &["oclaw.toml"])
        .says(0, "model", "ok", &["M weights, whole, for", "train"])
        .says(0, "scheduler", "ok", &["this machine"]);
    assert!(outcome.findings.iter().all(|it| it["result"] == "ok"), "{:#?}", outcome.findings);
}

#[test]
fn people_get_a_table() {
    let bench = Bench::new();
    fs::write(bench.path().join("other.toml"), bench.well()).unwrap();
    let output = oclaw()
        .args(["check", "other.toml"])
        .current_dir(bench.path())
        .assert()
        .success()
        .get_output()
        .clone();
    let text = String::from_utf8(output.stdout).unwrap();
    let header: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(header, ["check", "of", "result", "found", "what", "to", "do"]);
    assert!(text.lines().any(|line| line.contains("settings") && line.contains(" ok ")), "{text}");
    // The same by the flag that every command has.
    let flag = ["check", "--config", "other.toml"];
    oclaw().args(flag).current_dir(bench.path()).assert().success();
}

#[test]
fn settings_that_are_none_fail() {
    let bench = Bench::new();
    let output = oclaw().args(["check", "--json", "no.toml"]).current_dir(bench.path()).output();
    Outcome::of(&output.unwrap()).says(2, "settings", "fail", &["no.toml", "`oclaw init` writes"]);
    let refused = |text: &str, words: &[&str]| {
        bench.check(text, &[]).says(2, "settings", "fail", words);
    };
    refused("[serve\n", &["oclaw.toml", "line 1"]);
    refused("[judge]\nvots = 3\n", &["line 2", "no setting `vots`", "`votes`"]);
    refused("[jugde]\nvotes = 3\n", &["line 2", "no section `[jugde]`"]);
    let well = bench.well();
    refused(&format!("{well}at-once = \"many\"\n"), &["[hint]", "many", "--at-once"]);
    refused(&well.replace("rules = \"\"", ""), &["`judge` has nobody to ask"]);
    refused("[judge]\nrules = \"\"\n", &["nobody answers the chats"]);
    refused(&format!("{well}[loop]\nwithout = \"serve\"\n"), &["no stage `serve`"]);
    for (setting, word) in [
        ("weight-sync-interval = 0", "--weight-sync-interval"),
        ("grace = \"soon\"", "--grace"),
        ("log-size = \"10\"", "at least 4KiB"),
        ("give-up = 0", "--give-up"),
    ] {
        refused(&format!("{well}[loop]\n{setting}\n"), &["[loop]", word]);
    }
    let once = format!("{well}[advantage]\nonce = true\n");
    refused(&once, &["line 11", "`[advantage] once` has no effect in a loop"]);
    // A switch that is off says nothing.
    let never = once.replace("once = true", "once = false");
    bench.check(&never, &["--offline"]).says(0, "settings", "ok", &["oclaw.toml"]);
    let variable = [("OCLAW_TRAIN_OUT", "p")];
    let words = ["`OCLAW_TRAIN_OUT` in the environment has no effect in a loop"];
    bench.check_with(&well, &[], &variable).says(2, "settings", "fail", &words);
    let run = format!("{well}[loop]\nrun = \"s3://chats/run\"\n");
    refused(&run, &["`run` is to be a folder of a file system", "(`s3://`)"]);
}

#[test]
fn an_estimator_has_what_it_stands_on() {
    let bench = Bench::new();
    let check = |text: &str| bench.check(&format!("{}{text}", bench.well()), &["--offline"]);
    // Said for one of both, it is said for both.
    check("[train]\nestimator = \"grpo\"\n").says(0, "estimator", "ok", &["grpo"]);
    check("[train]\nestimator = \"grpo\"\n[advantage]\nestimator = \"opd\"\n").says(
        3,
        "estimator",
        "warn",
        &["`train` decides"],
    );
    check("").says(0, "estimator", "ok", &["hybrid"]);
    for estimator in ["hybrid", "topk-kl"] {
        let text = format!("[train]\nestimator = \"{estimator}\"\n");
        check(&text).says(0, "estimator", "ok", &[estimator]);
        let without = format!("{text}[teacher-lp]\ntopk = 0\n");
        check(&without).says(2, "estimator", "fail", &[estimator, "topk = 4"]);
    }
    // What the loop itself would refuse is refused in its words.
    check("[loop]\nwithout = \"teacher-lp\"\n").says(2, "settings", "fail", &["hybrid", "`grpo`"]);
    check("[loop]\nwithout = \"hint\"\n").says(2, "settings", "fail", &["hybrid", "`hint`"]);
    // The one that trains decides, whatever the other has.
    let other = "[advantage]\nestimator = \"grpo\"\n[train]\nestimator = ";
    for (estimator, without) in [("combine", "hint"), ("opd", "teacher-lp"), ("hybrid", "hint")] {
        let text = format!("{other}\"{estimator}\"\n[loop]\nwithout = \"{without}\"\n");
        let without = format!("`{without}`");
        check(&text).says(2, "settings", "fail", &[estimator, &without, "`grpo`"]);
    }
    check(
        "[loop]\nwithout = [\"hint\", \"teacher-lp\"]\n[train]\nestimator = \"grpo\"\n\
           [advantage]\nestimator = \"grpo\"\n",
    )
    .says(0, "estimator", "ok", &["grpo"]);
}

/// What is faulty is told once, under the name that it has in the file, and nothing is
/// said of what hangs on it.
#[test]
fn a_faulty_setting_is_one_finding() {
    let bench = Bench::new();
    for (fault, subject, estimators) in [
        ("[train]\nkeep = \"six\"\n", "[train]", 0),
        ("[loop]\ntrain-hours = [\"22-6\"]\n", "[loop]", 1),
        ("[loop]\ntrain-when-idle = \"soon\"\n", "[loop]", 1),
    ] {
        let outcome = bench.check(&format!("{}{fault}", bench.well()), &["--offline"]);
        outcome.says(2, "settings", "fail", &[subject]);
        let of = |check: &str| outcome.findings.iter().filter(|it| it["check"] == check).count();
        assert_eq!((of("settings"), of("estimator")), (1, estimators), "{:#?}", outcome.findings);
    }
}

/// What waits for a window is of one version, and each step of the window makes it older.
#[test]
fn a_window_of_training_needs_a_staleness() {
    let bench = Bench::new();
    let check = |rest: &str| bench.check(&format!("{}{rest}", bench.well()), &["--offline"]);
    let words = [
        "turns of a whole window have one version; after 4 steps the others are refused as stale",
        "set `[train] max-staleness`",
    ];
    for window in ["train-when-idle = \"10m\"", "train-hours = [\"22:00-06:00\"]"] {
        let window = format!("[loop]\n{window}\n");
        check(&window).says(3, "staleness", "warn", &words);
        let told = check(&format!("{window}[train]\nmax-staleness = 4\n"));
        assert!(told.findings.iter().all(|it| it["check"] != "staleness"), "{:#?}", told.findings);
    }
    let always = check("");
    assert!(always.findings.iter().all(|it| it["check"] != "staleness"), "{:#?}", always.findings);
}

#[test]
fn a_model_must_be_whole_and_known() {
    let bench = Bench::new();
    let broken = |name: &str, harm: &dyn Fn(&Path)| {
        let folder = bench.copy_model(name);
        harm(&folder);
        bench.check(&bench.with_model(&folder), &["--offline"])
    };
    let cut = |folder: &Path| {
        let path = folder.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
    };
    broken("cut", &cut).says(1, "model", "fail", &["its header announces"]);
    let foreign = |folder: &Path| {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(path, text.replace("qwen3", "mamba")).unwrap();
    };
    broken("foreign", &foreign).says(1, "model", "fail", &["mamba", "llama, qwen2, qwen3"]);
    let silent = |folder: &Path| fs::remove_file(folder.join("tokenizer.json")).unwrap();
    broken("silent", &silent).says(1, "model", "fail", &["tokenizer.json"]);
    let sharded = |folder: &Path| {
        fs::rename(folder.join("model.safetensors"), folder.join("a.safetensors")).unwrap();
        let index =
            r#"{"weight_map": {"model.norm.weight": "a.safetensors", "x": "a.safetensors"}}"#;
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    };
    broken("sharded", &sharded).says(1, "model", "fail", &["`a.safetensors` lacks the tensor `x`"]);
    bench.check(&bench.with_model(Path::new("nowhere")), &["--offline"]).says(
        2,
        "model",
        "fail",
        &["nowhere", "no `config.json`", "Hugging Face folder"],
    );
}

#[test]
fn whoever_shares_ids_shares_the_tokenizer() {
    let bench = Bench::new();
    let other = bench.copy_model("other");
    let path = other.join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, format!("{text} ")).unwrap();
    let other = format!("{:?}", other.display().to_string());
    for (section, key, who) in [("teacher-lp", "model", "teacher-lp"), ("train", "model", "train")]
    {
        let text = format!("{}[{section}]\n{key} = {other}\n", bench.well());
        let words = [who, "is not that of the policy's engine", "models of one family"];
        bench.check(&text, &["--offline"]).says(2, "tokenizer", "fail", &words);
    }
    // The judge reads words, not ids.
    let text = bench.well().replace("rules = \"\"", &format!("model = {other}"));
    bench.check(&text, &["--offline"]).says(0, "tokenizer", "ok", &["train", "the same"]);
}

#[test]
fn names_of_the_reference_count_as_ours() {
    let bench = Bench::new();
    let model = format!("{:?}", Bench::model().display().to_string());
    let text = format!(
        "[serve]\nhf-checkpoint = {model}\nlisten = \"127.0.0.1:{}\"\n{RULES}\
         [train]\nadvantage-estimator = \"reinforce_plus_plus\"\n",
        bench.front
    );
    let text = text
        .replace("[judge]", &format!("engine-listen = \"127.0.0.1:{}\"\n[judge]", bench.engine));
    let outcome = bench.check(&text, &[]);
    outcome
        .says(0, "estimator", "ok", &["reinforce++"])
        .says(0, "model", "ok", &["for serve, teacher-lp, train"])
        .says(0, "port", "ok", &[&bench.engine.to_string(), "serve's engine"]);
}

#[test]
fn the_loop_can_be_asked_the_same() {
    let bench = Bench::new();
    fs::write(bench.path().join("oclaw.toml"), bench.well()).unwrap();
    let mut command = oclaw();
    command.args(["loop", "oclaw.toml", "--dry-run"]).current_dir(bench.path());
    let output = command.assert().success().get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("scheduler"), "{text}");
    assert!(!bench.path().join("run").exists());
    // Its flags go before the file.
    command.args(["--run", "s3://chats/run"]);
    let output = command.assert().code(2).get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("`s3://`"), "{text}");
}
