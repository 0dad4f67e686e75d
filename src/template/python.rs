//! Things that templates take for granted because Python does them:
//! `json.dumps`, `str`, `str.strip`, `strftime`.

use serde_json::Value;

/// Strips what Python's `str.strip` strips: Unicode white space and the four
/// separators U+001C to U+001F, which `str::trim` leaves.
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Tells whether Python's `str.isspace` is true of a character.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// How `json.dumps` is asked to write.
#[derive(Debug, Clone)]
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

impl Dumps {
    /// Writes a value as Python's `json.dumps` does.
    pub(super) fn write(&self, value: &Value) -> String {
        let mut text = String::new();
        let comma = if self.indent.is_some() { "," } else { ", " };
        let (comma, colon) = match &self.separators {
            Some((comma, colon)) => (comma.as_str(), colon.as_str()),
            None => (comma, ": "),
        };
        self.value(&mut text, value, (comma, colon), 0);
        text
    }

    fn value(&self, text: &mut String, value: &Value, marks: (&str, &str), depth: usize) {
        match value {
            Value::Null => text.push_str("null"),
            Value::Bool(flag) => text.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => text.push_str(&number_text(number)),
            Value::String(string) => self.string(text, string),
            Value::Array(items) if items.is_empty() => text.push_str("[]"),
            Value::Object(members) if members.is_empty() => text.push_str("{}"),
            Value::Array(items) => {
                text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.gap(text, index > 0, marks.0, depth + 1);
                    self.value(text, item, marks, depth + 1);
                }
                self.gap(text, false, marks.0, depth);
                text.push(']');
            }
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                if self.sort_keys {
                    members.sort_by_key(|(key, _)| *key);
                }
                text.push('{');
                for (index, (key, member)) in members.into_iter().enumerate() {
                    self.gap(text, index > 0, marks.0, depth + 1);
                    self.string(text, key);
                    text.push_str(marks.1);
                    self.value(text, member, marks, depth + 1);
                }
                self.gap(text, false, marks.0, depth);
                text.push('}');
            }
        }
    }

    fn gap(&self, text: &mut String, comma: bool, mark: &str, depth: usize) {
        if comma {
            text.push_str(mark);
        }
        if let Some(indent) = &self.indent {
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
    }

    fn string(&self, text: &mut String, string: &str) {
        text.push('"');
        for character in string.chars() {
            match character {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                control if control < ' ' => text.push_str(&format!("\\u{:04x}", control as u32)),
                wide if self.ensure_ascii && !wide.is_ascii() => {
                    for unit in wide.encode_utf16(&mut [0; 2]) {
                        text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                other => text.push(other),
            }
        }
        text.push('"');
    }
}

/// Writes a number as Python's `repr` does.
fn number_text(number: &serde_json::Number) -> String {
    match number.as_f64().filter(|_| number.is_f64()) {
        Some(float) => float_text(float),
        None => number.to_string(),
    }
}

/// Writes a float as Python's `repr` does: shortest digits that come back,
/// exponent form below 1e-4 and from 1e16 on.
fn float_text(float: f64) -> String {
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let magnitude = float.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = float.to_string();
    if text.contains('.') { text } else { format!("{text}.0") }
}

/// Writes a value as Python's `str` does.
pub(super) fn str_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => repr(other),
    }
}

fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number_text(number),
        Value::String(text) => repr_text(text),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(repr).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(members) => {
            let pair =
                |(key, member): (&String, &Value)| format!("{}: {}", repr_text(key), repr(member));
            let members: Vec<_> = members.iter().map(pair).collect();
            format!("{{{}}}", members.join(", "))
        }
    }
}

fn repr_text(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut written = String::from(quote);
    for character in text.chars() {
        match character {
            '\\' => written.push_str("\\\\"),
            '\n' => written.push_str("\\n"),
            '\r' => written.push_str("\\r"),
            '\t' => written.push_str("\\t"),
            same if same == quote => {
                written.push('\\');
                written.push(same);
            }
            control if control < ' ' || control == '\u{7f}' => {
                written.push_str(&format!("\\x{:02x}", control as u32));
            }
            other => written.push(other),
        }
    }
    written.push(quote);
    written
}

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a moment (seconds since 1970, UTC) as `strftime` does in the C
/// locale. A directive it does not know stays as it is.
pub(super) fn strftime(seconds: i64, format: &str) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let weekday = (days + 4).rem_euclid(7);
    let name = |names: &[&str], index: i64| {
        names
            .get(usize::try_from(index).unwrap_or_default())
            .copied()
            .unwrap_or_default()
            .to_owned()
    };
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut directive = rest.next();
        // The platforms' way to leave the padding out.
        let bare = directive == Some('-');
        if bare {
            directive = rest.next();
        }
        let two = |number: i64| if bare { number.to_string() } else { format!("{number:02}") };
        text.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year.rem_euclid(100)),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('A') => name(&DAYS, weekday),
            Some('a') => name(&DAYS, weekday).chars().take(3).collect(),
            Some('B') => name(&MONTHS, month - 1),
            Some('b' | 'h') => name(&MONTHS, month - 1).chars().take(3).collect(),
            Some('j') => format!("{:03}", days - days_before(year) + 1),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        });
    }
    text
}

/// Days from 1970-01-01 to the first of January of a year.
fn days_before(year: i64) -> i64 {
    let past = year - 1;
    365 * (year - 1970) + (past.div_euclid(4) - past.div_euclid(100) + past.div_euclid(400)) - 477
}

/// Year, month and day of a day number, by Hinnant's algorithm over 400-year
/// eras that begin in March.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn floats_as_python_writes_them() {
        let cases = [
            (1000.0, "1000.0"),
            (2.5, "2.5"),
            (1e-6, "1e-06"),
            (1.5e-7, "1.5e-07"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (1e-4, "0.0001"),
            (-0.0, "-0.0"),
            (1e100, "1e+100"),
        ];
        for (float, text) in cases {
            assert_eq!(float_text(float), text);
        }
    }

    #[test]
    fn dumps_with_each_option() {
        let value = json!({"b": [1, {}, []], "a": "<é🙂>\u{1}"});
        let plain = Dumps { ensure_ascii: false, indent: None, separators: None, sort_keys: false };
        assert_eq!(plain.write(&value), r#"{"b": [1, {}, []], "a": "<é🙂>\u0001"}"#);
        let sorted = Dumps { ensure_ascii: true, sort_keys: true, ..plain.clone() };
        assert_eq!(
            sorted.write(&value),
            r#"{"a": "<\u00e9\ud83d\ude42>\u0001", "b": [1, {}, []]}"#
        );
        let indented = Dumps { indent: Some("  ".to_owned()), ..plain };
        assert_eq!(
            indented.write(&value),
            "{\n  \"b\": [\n    1,\n    {},\n    []\n  ],\n  \"a\": \"<é🙂>\\u0001\"\n}"
        );
    }

    #[test]
    fn str_as_python_writes_it() {
        assert_eq!(
            str_of(&json!({"a": 1.5, "b": [true, null, "it's"]})),
            "{'a': 1.5, 'b': [True, None, \"it's\"]}"
        );
        assert_eq!(str_of(&json!("plain")), "plain");
    }

    #[test]
    fn dates() {
        // Computed with Python's datetime in UTC.
        assert_eq!(strftime(1_795_953_600, "%d %b %Y"), "29 Nov 2026");
        assert_eq!(
            strftime(1_795_953_600, "%A %B %-d %H:%M:%S %j"),
            "Sunday November 29 12:00:00 333"
        );
        assert_eq!(strftime(951_782_400, "%F %I %p %y"), "2000-02-29 12 AM 00");
        assert_eq!(strftime(0, "%Y-%m-%d %% %Q"), "1970-01-01 % %Q");
    }
}
