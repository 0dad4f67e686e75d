//! Durations and sizes as people type them.

use std::time::Duration;

/// Longest time: a year of seconds. More is a slip of the pen, and clocks overflow.
pub(crate) const YEAR: u64 = 365 * 24 * 3600;
const LONGEST: f64 = YEAR as f64;
/// Highest temperature; above it all tokens are alike.
const HOTTEST: f64 = 1000.0;

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
    match number * seconds {
        total if (0.0..=LONGEST).contains(&total) => Ok(Duration::from_secs_f64(total)),
        _ => Err(format!("no time: `{text}`; wanted 0 to {} h", LONGEST / 3600.0)),
    }
}

/// Reads a limit in seconds.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if value > 0.0 && value <= LONGEST => Ok(value),
        _ => Err(format!("wanted seconds above 0, up to {LONGEST}")),
    }
}

/// Reads a sampling temperature.
pub(crate) fn temperature(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if (0.0..=HOTTEST).contains(&value) => Ok(value),
        _ => Err(format!("wanted a number from 0 to {HOTTEST}")),
    }
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
    // From behind, for a number may have an exponent.
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    (number.trim(), &text[number.len()..])
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
        assert_eq!(duration("8760h").unwrap(), Duration::from_secs(31_536_000));
        for odd in ["8761h", "1e300", "1e300h", "-1s"] {
            let wanted = format!("no time: `{odd}`; wanted 0 to 8760 h");
            assert_eq!(duration(odd), Err(wanted), "{odd}");
        }
    }

    #[test]
    fn limits_have_bounds_that_are_told() {
        assert_eq!(super::seconds("0.5"), Ok(0.5));
        assert_eq!(super::seconds("31536000"), Ok(31_536_000.0));
        for odd in ["0", "-1", "1e300", "inf", "nan", "x", "31536001"] {
            assert_eq!(super::seconds(odd).unwrap_err(), "wanted seconds above 0, up to 31536000");
        }
        assert_eq!(super::temperature("0"), Ok(0.0));
        for odd in ["-0.1", "1e300", "1001", "nan", "warm"] {
            let told = super::temperature(odd).unwrap_err();
            assert_eq!(told, "wanted a number from 0 to 1000", "{odd}");
        }
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
