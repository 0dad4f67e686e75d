//! Durations and sizes as people type them.

use std::time::Duration;

/// Reads a duration: `50ms`, `10s`, `30m`, `2h`. A bare number is seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("no unit `{unit}`; there are `ms`, `s`, `m`, `h`")),
    };
    let number: f64 = number.parse().map_err(|_| format!("no number: `{number}`"))?;
    Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string())
}

/// Reads a size: `64MiB`, `10k`, `1GB`. A bare number is bytes.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let (number, unit) = split(text);
    let size: f64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "kb" => 1e3,
        "m" | "mib" => 1024.0 * 1024.0,
        "mb" => 1e6,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "gb" => 1e9,
        _ => return Err(format!("no unit `{unit}`; there are `k`, `M`, `G`, `KiB`, `MB` …")),
    };
    let number: f64 = number.parse().map_err(|_| format!("no number: `{number}`"))?;
    let bytes = number * size;
    match bytes.is_finite() && bytes >= 0.0 && bytes <= u32::MAX as f64 * 1024.0 {
        true => Ok(bytes as usize),
        false => Err(format!("no size: `{text}`")),
    }
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    (text[..end].trim(), text[end..].trim())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{bytes, duration};

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("50ms").unwrap(), Duration::from_millis(50));
        assert_eq!(duration("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(duration("30m").unwrap(), Duration::from_secs(1800));
        assert_eq!(duration("2 h").unwrap(), Duration::from_secs(7200));
        assert_eq!(duration("7").unwrap(), Duration::from_secs(7));
        assert!(duration("7 days").is_err());
        assert!(duration("-1s").is_err());
        assert!(duration("s").is_err());
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("64MiB").unwrap(), 64 << 20);
        assert_eq!(bytes("10k").unwrap(), 10_240);
        assert_eq!(bytes("1MB").unwrap(), 1_000_000);
        assert_eq!(bytes("12").unwrap(), 12);
        assert!(bytes("12 apples").is_err());
        assert!(bytes("-1").is_err());
    }
}
