//! Engines that somebody else runs: whether they answer, what they speak, and what
//! they cannot do. Keys, where they are needed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::engine::{Dialect, Engine, EngineOptions, Retries, VLLM_MOST_TOP};
use oclaw::pipeline::{Origin, Serves};
use secrecy::SecretString;

use super::finding::Finding;
use super::setup::Setup;
use crate::embedded;
use crate::files::told;
use crate::report::Kind;

const PATIENCE: Duration = Duration::from_secs(10);

/// What somebody wants of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Want {
    Answers,
    Weights,
    Verdicts,
    Scores,
}

/// An engine to ask: who wants what of it.
struct Asked {
    url: String,
    wants: Vec<(String, Want)>,
}

/// Asks every engine that the loop does not start itself. Returns the tokenizers
/// that they name.
pub(super) async fn engines(setup: &Setup, findings: &mut Vec<Finding>) -> Vec<(String, PathBuf)> {
    let mut tokenizers = Vec::new();
    for asked in asked(setup) {
        let Asked { url, wants } = &asked;
        match meet(setup, url, wants).await {
            Ok(engine) => {
                findings.push(able(setup, &engine, &asked).await);
                let shares = |want: &Want| matches!(want, Want::Answers | Want::Scores);
                if wants.iter().any(|(_, want)| shares(want))
                    && let Some(folder) = tokenizer(&engine).await
                {
                    tokenizers.push((format!("the engine at {}", engine.url()), folder));
                }
            }
            Err(error) => {
                let names: Vec<&str> = wants.iter().map(|(name, _)| name.as_str()).collect();
                let subject = format!("{} for {}", told(url), names.join(", "));
                findings.push(Finding::error("engine", subject, error));
            }
        }
    }
    tokenizers
}

/// Lists the engines that somebody else runs.
fn asked(setup: &Setup) -> Vec<Asked> {
    let mut found: BTreeMap<String, Vec<(String, Want)>> = BTreeMap::new();
    let wants = [
        ("serve", "engine", Want::Answers),
        ("sync-weights", "engine", Want::Weights),
        ("judge", "engine", Want::Verdicts),
        ("hint", "engine", Want::Verdicts),
        ("teacher-lp", "engine", Want::Scores),
        ("teacher-lp", "student", Want::Scores),
    ];
    for (name, key, want) in wants {
        for url in setup.values(name, key).into_iter().filter(|url| url.contains("://")) {
            if !setup.starts(&url) {
                found.entry(url).or_default().push((name.to_owned(), want));
            }
        }
    }
    for (name, engine) in &setup.plan.engines {
        if engine.origin == Origin::Elsewhere {
            let want = match engine.serves {
                Serves::Policy => Want::Answers,
                Serves::Judge => Want::Verdicts,
                Serves::Teacher => Want::Scores,
            };
            found.entry(engine.url.clone()).or_default().push((format!("[engines.{name}]"), want));
        }
    }
    found.into_iter().map(|(url, wants)| Asked { url, wants }).collect()
}

async fn meet(setup: &Setup, url: &str, wants: &[(String, Want)]) -> anyhow::Result<Engine> {
    let mut options = EngineOptions::new(url);
    (options.timeout, options.retries) = (PATIENCE, Retries::none());
    for (name, _) in wants.iter().filter(|(name, _)| setup.runs(name)) {
        options.key = options.key.or(key(setup, name)?);
        options.model = options.model.or_else(|| setup.value(name, "engine-model"));
    }
    // Whoever asks for verdicts has to name a model where there are several.
    Ok(match wants.iter().any(|(_, want)| *want == Want::Verdicts) {
        true => Engine::connect(options).await?,
        false => Engine::attach(options).await?,
    })
}

/// Says what an engine that answers cannot do of what is wanted.
async fn able(setup: &Setup, engine: &Engine, asked: &Asked) -> Finding {
    let dialect = engine.dialect();
    let names: Vec<&str> = asked.wants.iter().map(|(name, _)| name.as_str()).collect();
    let subject = format!("{} for {}", engine.url(), names.join(", "));
    if let Err(error) = engine.health().await {
        return Finding::error("engine", subject, error);
    }
    let model = engine.model().map_or(String::new(), |model| format!(", `{model}`"));
    let found = format!("answers in the dialect `{dialect}`{model}");
    let wanted = |want| asked.wants.iter().any(|(_, other)| *other == want);
    let most = u16::try_from(VLLM_MOST_TOP).unwrap_or(u16::MAX);
    let topk = setup.value("teacher-lp", "topk").and_then(|topk| topk.parse().ok());
    let syncs = setup.runs("sync-weights");
    match dialect {
        _ if wanted(Want::Scores) && !matches!(dialect, Dialect::Sglang | Dialect::Vllm) => {
            Finding::fail("engine", subject, format!("{found}: it cannot score given ids"))
                .remedy("a teacher is SGLang, vLLM or `[teacher-lp] model`")
        }
        Dialect::Vllm if wanted(Want::Scores) && topk.is_some_and(|topk: u16| topk > most) => {
            Finding::fail("engine", subject, format!("{found}: it tells the {most} likeliest only"))
                .remedy(format!("`[teacher-lp] topk = {most}` or less"))
        }
        Dialect::Sglang => Finding::ok("engine", subject, found),
        _ if syncs && (wanted(Want::Weights) || wanted(Want::Answers)) => {
            Finding::fail("engine", subject, format!("{found}: it takes no new weights")).remedy(
                "serve with SGLang or `oclaw engine`, or `[loop] without = [\"sync-weights\"]`",
            )
        }
        Dialect::Vllm => Finding::ok("engine", subject, found),
        _ if wanted(Want::Answers) => Finding::warn(
            "engine",
            subject,
            format!("{found}: it tells no ids, so that nothing of it can be trained"),
        )
        .remedy("serve with SGLang, vLLM or `oclaw engine`"),
        _ => Finding::ok("engine", subject, found),
    }
}

/// Returns the folder of the tokenizer that a server names, if it is on this
/// machine.
async fn tokenizer(engine: &Engine) -> Option<PathBuf> {
    let info = engine.model_info().await.ok()?;
    let folder = info.tokenizer_path.or(info.model_path).map(PathBuf::from)?;
    (folder.is_absolute() && folder.join("tokenizer.json").is_file()).then_some(folder)
}

/// Returns the key that a stage will have.
fn key(setup: &Setup, name: &str) -> anyhow::Result<Option<SecretString>> {
    let file = setup.value(name, "engine-key-file");
    if file.is_none()
        && let Some(process) = setup.plan.processes.get(name)
        && let Some(key) = process.env.get(&variable(name))
    {
        return Ok(Some(SecretString::from(key.clone())));
    }
    embedded::key(name, file.as_deref().map(Path::new))
}

fn variable(name: &str) -> String {
    format!("OCLAW_{}_KEY", name.replace('-', "_").to_uppercase())
}

/// Looks for the keys that the file names, and for those that are missing.
pub(super) fn keys(setup: &Setup, findings: &mut Vec<Finding>) {
    const FILES: [&str; 5] =
        ["engine-key-file", "student-key-file", "proxy-key-file", "key-file", "control-key-file"];
    for file in FILES {
        for (name, path) in setup.with(file) {
            let subject = format!("[{name}] {file}");
            findings.push(match std::fs::read_to_string(&path) {
                Ok(text) if text.trim().is_empty() => {
                    Finding::fail("key", subject, format!("`{path}` is empty"))
                }
                Ok(_) => Finding::ok("key", subject, format!("there is one in `{path}`")),
                Err(error) => Finding::fail("key", subject, format!("`{path}`: {error}"))
                    .remedy("write the key into that file, readable by you alone"),
            });
        }
    }
    for (name, url) in setup.with("engine") {
        if !url.contains("https://") || setup.value(name, "engine-key-file").is_some() {
            continue;
        }
        let (subject, variable) = (format!("[{name}] engine"), variable(name));
        findings.push(match key(setup, name) {
            Ok(Some(_)) => Finding::ok("key", subject, format!("`{variable}` has one")),
            Ok(None) => Finding::warn("key", subject, format!("none for `{}`", told(&url)))
                .remedy(format!("`export {variable}=…`, or `[{name}] engine-key-file`")),
            Err(error) => Finding::error("key", subject, error),
        });
    }
    let listen = setup.value("serve", "listen").unwrap_or_default();
    let address = listen.parse::<std::net::SocketAddr>();
    let open = address.is_ok_and(|address| !address.ip().is_loopback());
    if open && setup.value("serve", "key-file").is_none() {
        let found = format!("everybody on the network could chat at {listen}");
        let finding = Finding::fail("key", "[serve] listen", found).because(Kind::Usage);
        findings.push(finding.remedy("`[serve] key-file`, or listen on 127.0.0.1"));
    }
}
