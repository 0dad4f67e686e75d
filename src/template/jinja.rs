//! Jinja as `transformers` sets it up.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, ErrorKind, State, Value as Jinja};
use regex::Regex;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::Error;
use super::python::{Dumps, strftime};

/// Name of the template that is used unless the request has tools and the
/// folder has a template for them.
const DEFAULT: &str = "default";
/// Name of the template for requests with tools.
const TOOL_USE: &str = "tool_use";
/// The special tokens that templates know by name.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The chat template (or templates) of a model folder.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    /// Name and source, in the order of the files.
    sources: Vec<(String, String)>,
    tokens: Map<String, Value>,
}

impl Template {
    /// Loads from a Hugging Face folder. `chat_template.jinja` wins over the
    /// configuration; the list form and `additional_chat_templates/` give
    /// further templates by name.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        let config_file = folder.join("tokenizer_config.json");
        let config = read_json(&config_file)?.unwrap_or_default();
        let map = read_json(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
        let mut sources = configured(&config);
        let mut files = HashMap::new();
        let own_file = folder.join("chat_template.jinja");
        if let Some(source) = read_text(&own_file)? {
            sources.retain(|(name, _)| name != DEFAULT);
            sources.insert(0, (DEFAULT.to_owned(), source));
            files.insert(DEFAULT.to_owned(), own_file);
        }
        for path in additional(&folder.join("additional_chat_templates"))? {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(source) = read_text(&path)? {
                sources.retain(|(known, _)| *known != name);
                sources.push((name.clone(), source));
                files.insert(name, path);
            }
        }
        let mut tokens = Map::new();
        for name in TOKENS {
            let of = |config: &Map<String, Value>| config.get(name).and_then(token_text);
            if let Some(text) = of(&config).or_else(|| of(&map)) {
                tokens.insert(name.to_owned(), Value::String(text));
            }
        }
        match sources.is_empty() {
            true => Err(Error::NoTemplate { folder: folder.to_owned() }),
            false => Self::new(sources, tokens).map_err(|error| match error {
                Error::Syntax { place, line, message } => {
                    let place = files.get(&place).unwrap_or(&config_file).display().to_string();
                    Error::Syntax { place, line, message }
                }
                error => error,
            }),
        }
    }

    /// Compiles templates, given by name and source, with the special tokens
    /// they may print.
    pub fn new(sources: Vec<(String, String)>, tokens: Map<String, Value>) -> Result<Self, Error> {
        let mut environment = environment()?;
        for (name, source) in &sources {
            environment.add_template_owned(name.clone(), without_generation_tags(source)).map_err(
                |error| Error::Syntax {
                    place: name.clone(),
                    line: line(&error),
                    message: words(&error),
                },
            )?;
        }
        Ok(Self { environment, sources, tokens })
    }

    /// Renders what it is given, as it is.
    pub fn render(
        &self,
        messages: &Value,
        tools: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, Error> {
        let mut variables = self.tokens.clone();
        variables.insert("messages".to_owned(), messages.clone());
        variables.insert("tools".to_owned(), tools.clone());
        variables.insert("documents".to_owned(), Value::Null);
        variables.insert("add_generation_prompt".to_owned(), add_generation_prompt.into());
        variables.extend(extra.iter().map(|(name, value)| (name.clone(), value.clone())));
        let has = |wanted: &str| self.sources.iter().any(|(name, _)| name == wanted);
        let name = match !tools.is_null() && has(TOOL_USE) {
            true => TOOL_USE,
            false if has(DEFAULT) => DEFAULT,
            false => self.sources.first().map_or(DEFAULT, |(name, _)| name),
        };
        let failed =
            |error: minijinja::Error| Error::Render { line: line(&error), message: words(&error) };
        let template = self.environment.get_template(name).map_err(failed)?;
        template.render(Serde(&variables)).map_err(failed)
    }

    /// Tells whether a word stands anywhere in the source.
    pub(super) fn knows(&self, word: &str) -> bool {
        self.sources.iter().any(|(_, source)| source.contains(word))
    }

    /// Returns the SHA-256 of all sources.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        for (index, (name, source)) in self.sources.iter().enumerate() {
            // A lone template hashes as the file does.
            if index > 0 {
                hash.update([0]);
                hash.update(name);
                hash.update([0]);
            }
            hash.update(source);
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let syntax = minijinja::syntax::SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| Error::Syntax {
            place: DEFAULT.to_owned(),
            line: 0,
            message: words(&error),
        })?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_function(
        "raise_exception",
        |text: String| -> Result<Jinja, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
        },
    );
    environment.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |past| past.as_secs());
        strftime(i64::try_from(now).unwrap_or_default(), &format)
    });
    Ok(environment)
}

/// Python's string methods that the contrib crate leaves out, then its own.
fn method(
    state: &mut State<'_, '_>,
    value: &Jinja,
    name: &str,
    arguments: &[Jinja],
) -> Result<Jinja, minijinja::Error> {
    let text = |index: usize| arguments.get(index).and_then(Jinja::as_str);
    if let (Some(subject), Some(argument)) = (value.as_str(), text(0)) {
        match name {
            "removeprefix" => return Ok(subject.strip_prefix(argument).unwrap_or(subject).into()),
            "removesuffix" => return Ok(subject.strip_suffix(argument).unwrap_or(subject).into()),
            "rsplit" if !argument.is_empty() => return rsplit(subject, argument, arguments.get(1)),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

fn rsplit(subject: &str, mark: &str, limit: Option<&Jinja>) -> Result<Jinja, minijinja::Error> {
    let limit = limit.map_or(Ok(-1), |limit| i64::try_from(limit.clone()))?;
    let pieces = match usize::try_from(limit) {
        Ok(limit) => subject.rsplitn(limit + 1, mark).collect::<Vec<_>>(),
        Err(_) => subject.rsplit(mark).collect(),
    };
    Ok(pieces.into_iter().rev().map(Jinja::from).collect::<Vec<_>>().into())
}

/// `json.dumps` with the defaults that `transformers` gives it.
fn tojson(value: &Jinja, options: Kwargs) -> Result<Jinja, minijinja::Error> {
    let failed = |message: String| minijinja::Error::new(ErrorKind::InvalidOperation, message);
    let indent: Option<Jinja> = options.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) if indent.kind() == ValueKind::String => Some(indent.to_string()),
        Some(indent) => Some(" ".repeat(usize::try_from(indent)?)),
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = match separators.as_deref() {
        None => None,
        Some([comma, colon]) => Some((comma.clone(), colon.clone())),
        Some(_) => return Err(failed("`separators` takes two strings".to_owned())),
    };
    let dumps = Dumps {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        separators,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(failed("undefined is no JSON".to_owned()));
    }
    let value = serde_json::to_value(value).map_err(|error| failed(error.to_string()))?;
    Ok(Jinja::from_safe_string(dumps.write(&value)))
}

/// Turns `{% generation %}` blocks, which mark what is trained and print
/// nothing themselves, into blocks that minijinja knows.
fn without_generation_tags(source: &str) -> String {
    let Ok(tag) = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}") else {
        return source.to_owned();
    };
    let replaced = tag.replace_all(source, |found: &regex::Captures<'_>| {
        let block = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {block} {}%}}", &found[1], &found[3])
    });
    replaced.into_owned()
}

fn line(error: &minijinja::Error) -> usize {
    error.line().unwrap_or_default()
}

fn words(error: &minijinja::Error) -> String {
    let kind = error.kind();
    match error.detail() {
        Some(detail) if kind == ErrorKind::InvalidOperation => detail.to_owned(),
        Some(detail) => format!("{kind}: {detail}"),
        None => kind.to_string(),
    }
}

/// Returns the templates of `tokenizer_config.json`: one text, or a list of
/// `{name, template}`.
fn configured(config: &Map<String, Value>) -> Vec<(String, String)> {
    match config.get("chat_template") {
        Some(Value::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|entry| {
                let text = |key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                Some((text("name")?, text("template")?))
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// A special token is a text or an object with its `content`.
fn token_text(token: &Value) -> Option<String> {
    let text = token.as_str().or_else(|| token.get("content").and_then(Value::as_str));
    text.map(str::to_owned)
}

fn additional(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let failed = |source| Error::Read { path: folder.to_owned(), source };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|ending| ending == "jinja") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read_text(path: &Path) -> Result<Option<String>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.to_owned(), source }),
    }
}

fn read_json(path: &Path) -> Result<Option<Map<String, Value>>, Error> {
    let malformed = |message: String| Error::Malformed { path: path.to_owned(), message };
    match read_text(path)?.map(|text| serde_json::from_str(&text)) {
        None => Ok(None),
        Some(Ok(Value::Object(members))) => Ok(Some(members)),
        Some(Ok(_)) => Err(malformed("no JSON object".to_owned())),
        Some(Err(error)) => Err(malformed(error.to_string())),
    }
}
