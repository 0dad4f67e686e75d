//! Values of the file, with the line of what is wrong.

use std::collections::BTreeMap;
use std::time::Duration;

use toml::de::DeValue;

use super::ReadTime;
use crate::pipeline::Error;

/// Reads values of one text.
pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    pub(super) time: ReadTime,
}

impl Reader<'_> {
    /// Returns the line of a place in the text.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.text[..offset].matches('\n').count() + 1
    }

    pub(super) fn text(
        &self,
        value: &DeValue<'_>,
        key: &str,
        line: usize,
    ) -> Result<String, Error> {
        match value {
            DeValue::String(text) if !text.trim().is_empty() => Ok(text.to_string()),
            _ => Err(Error::Plan { line, problem: format!("`{key}` is to be a text") }),
        }
    }

    pub(super) fn texts(
        &self,
        value: &DeValue<'_>,
        key: &str,
        line: usize,
    ) -> Result<Vec<String>, Error> {
        let wrong = || Error::Plan { line, problem: format!("`{key}` is to be a list of texts") };
        let DeValue::Array(items) = value else { return Err(wrong()) };
        let text = |value: &DeValue<'_>| match value {
            DeValue::String(text) => Ok(text.to_string()),
            _ => Err(wrong()),
        };
        items.iter().map(|item| text(item.get_ref())).collect()
    }

    pub(super) fn time(
        &self,
        value: &DeValue<'_>,
        key: &str,
        line: usize,
    ) -> Result<Duration, Error> {
        let text = flag_values(value).filter(|values| values.len() == 1);
        let text = text.and_then(|values| values.into_iter().next()).unwrap_or_default();
        (self.time)(&text)
            .map_err(|problem| Error::Plan { line, problem: format!("`{key}`: {problem}") })
    }

    pub(super) fn gpus(&self, value: &DeValue<'_>, line: usize) -> Result<Vec<u32>, Error> {
        let wrong = || {
            let problem = "`gpus` is to be a list of device numbers, as in `[4, 5]`".to_owned();
            Error::Plan { line, problem }
        };
        let DeValue::Array(items) = value else { return Err(wrong()) };
        let number = |value: &DeValue<'_>| match value {
            DeValue::Integer(number) => number.as_str().parse().map_err(|_| wrong()),
            _ => Err(wrong()),
        };
        let gpus: Vec<u32> =
            items.iter().map(|item| number(item.get_ref())).collect::<Result<_, _>>()?;
        match gpus.iter().enumerate().find(|(index, gpu)| gpus[..*index].contains(gpu)) {
            Some((_, gpu)) => {
                Err(Error::Plan { line, problem: format!("`gpus` has device {gpu} twice") })
            }
            None => Ok(gpus),
        }
    }

    pub(super) fn env(
        &self,
        value: &DeValue<'_>,
        line: usize,
    ) -> Result<BTreeMap<String, String>, Error> {
        let DeValue::Table(table) = value else {
            let problem = "`env` is to be a table, as in `{ NAME = \"value\" }`".to_owned();
            return Err(Error::Plan { line, problem });
        };
        let mut found = BTreeMap::new();
        for (key, value) in table {
            let at = self.line(key.span().start);
            let name = key.get_ref().as_ref();
            if name == "CUDA_VISIBLE_DEVICES" {
                let problem = format!("`{name}` comes from `gpus`");
                return Err(Error::Plan { line: at, problem });
            }
            let values = match value.get_ref() {
                DeValue::Array(_) => None,
                value => flag_values(value),
            };
            let Some(value) = values.and_then(|values| values.into_iter().next()) else {
                let problem = format!("`env.{name}` is to be a text");
                return Err(Error::Plan { line: at, problem });
            };
            found.insert(name.to_owned(), value);
        }
        Ok(found)
    }

    pub(super) fn unknown(&self, key: &str, section: &str, known: &[&str], line: usize) -> Error {
        let known: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
        let known = known.join(", ");
        let problem = format!("no setting `{key}` in `[{section}]`; settings are {known}");
        Error::Plan { line, problem }
    }
}

/// Returns a value as a flag takes it, if any does.
pub(super) fn flag_values(value: &DeValue<'_>) -> Option<Vec<String>> {
    Some(match value {
        DeValue::String(text) => vec![text.to_string()],
        DeValue::Integer(number) => vec![number.as_str().to_owned()],
        DeValue::Float(number) => vec![number.as_str().to_owned()],
        DeValue::Boolean(flag) => vec![flag.to_string()],
        DeValue::Array(items) => {
            let items: Option<Vec<_>> =
                items.iter().map(|item| flag_values(item.get_ref())).collect();
            items?.into_iter().flatten().collect()
        }
        _ => return None,
    })
}
