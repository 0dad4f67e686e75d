//! The request of a recorded turn, made again.

use serde_json::{Map, Value, json};

use crate::trajectory::words::LogProbKind;
use crate::trajectory::{Sampling, Turn};

/// Settings that replace the recorded ones.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Overrides {
    /// Softmax temperature; 0 is greedy.
    pub temperature: Option<f64>,
    /// Seed of the sampler.
    pub seed: Option<i64>,
    /// Limit on new tokens.
    pub max_tokens: Option<u32>,
}

/// Returns the body of a chat request: the messages given, the turn's tools, and
/// the sampling settings that its request stated. What it left to the server is
/// left to the server again.
pub fn body(
    model: Option<&str>,
    turn: &Turn,
    messages: &[Value],
    overrides: &Overrides,
) -> Result<Value, String> {
    let mut body = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(name.to_owned(), value);
        }
    };
    set("model", model.map(Value::from));
    set("messages", Some(json!(messages)));
    let tools = turn.tools.as_deref().map(serde_json::from_str::<Value>).transpose();
    set("tools", tools.map_err(|error| format!("`tools` is not usable: {error}"))?);
    let sampling = &turn.sampling;
    let temperature = overrides.temperature.or(sampling.temperature.map(as_written));
    set("temperature", temperature.map(Value::from));
    set("top_p", sampling.top_p.map(as_written).map(Value::from));
    set("top_k", sampling.top_k.map(Value::from));
    set("min_p", sampling.min_p.map(as_written).map(Value::from));
    set("seed", overrides.seed.or(sampling.seed).map(Value::from));
    set("max_tokens", overrides.max_tokens.or(sampling.max_tokens).map(Value::from));
    // Of the stop strings a row tells only the one that was met.
    let met = turn.matched_stop.as_deref().filter(|_| turn.ends_with_stop_token == Some(false));
    set("stop", met.map(|stop| json!([stop])));
    Ok(Value::Object(body))
}

/// Returns the settings that such a request states.
pub fn sampling(turn: &Turn, overrides: &Overrides, log_prob_kind: LogProbKind) -> Sampling {
    let recorded = &turn.sampling;
    let temperature = overrides.temperature.map(|temperature| temperature as f32);
    Sampling {
        temperature: temperature.or(recorded.temperature),
        seed: overrides.seed.or(recorded.seed),
        max_tokens: overrides.max_tokens.or(recorded.max_tokens),
        log_prob_kind,
        ..recorded.clone()
    }
}

/// Returns the number that was typed: 0.7, not the nearest `f32` in full.
fn as_written(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stated_is_stated_again() {
        let sampling = Sampling {
            temperature: Some(0.7),
            top_k: Some(20),
            seed: Some(7),
            max_tokens: Some(40),
            ..Sampling::default()
        };
        let turn = Turn {
            sampling,
            tools: Some("[{\"type\":\"function\"}]".to_owned()),
            matched_stop: Some("END".to_owned()),
            ends_with_stop_token: Some(false),
            ..Turn::default()
        };
        let messages = [json!({"role": "user", "content": "hi"})];
        let made = body(Some("m"), &turn, &messages, &Overrides::default()).unwrap();
        let wanted = json!({
            "model": "m",
            "messages": messages,
            "tools": [{"type": "function"}],
            "temperature": 0.7,
            "top_k": 20,
            "seed": 7,
            "max_tokens": 40,
            "stop": ["END"],
        });
        assert_eq!(made, wanted);
        let greedy = Overrides { temperature: Some(0.0), seed: Some(1), max_tokens: Some(2) };
        let made = body(None, &turn, &messages, &greedy).unwrap();
        assert_eq!(
            (&made["temperature"], &made["seed"], &made["max_tokens"]),
            (&json!(0.0), &json!(1), &json!(2))
        );
        assert_eq!(made.get("model"), None);
    }

    #[test]
    fn the_stop_token_is_no_stop_string() {
        let turn = Turn {
            matched_stop: Some("1017".to_owned()),
            ends_with_stop_token: Some(true),
            ..Turn::default()
        };
        assert_eq!(body(None, &turn, &[], &Overrides::default()).unwrap(), json!({"messages": []}));
    }
}
