//! Instants as logs write them.

use serde_json::Value;

const SECOND: i64 = 1_000_000;

/// Returns the first of some members that is an instant, in microseconds since
/// 1970.
pub(super) fn of(value: &Value, names: &[&str]) -> Option<i64> {
    names.iter().filter_map(|name| value.get(name)).find_map(read)
}

/// Reads seconds or milliseconds since 1970, or `2026-03-14 12:00:00` with or
/// without a zone. Without one it is taken as UTC: the log does not say.
fn read(value: &Value) -> Option<i64> {
    match value {
        Value::Number(number) => {
            let number = number.as_f64().filter(|number| *number > 0.0)?;
            // Seconds pass 1e11 in the year 5138, milliseconds passed it in 1973.
            let seconds = if number < 1e11 { number } else { number / 1e3 };
            Some((seconds * 1e6).round() as i64).filter(|micros| *micros < 253_402_300_800 * SECOND)
        }
        Value::String(text) => written(text.trim()),
        _ => None,
    }
}

fn written(text: &str) -> Option<i64> {
    let part = |from: usize, to: usize| -> Option<i64> {
        let digits = text.get(from..to)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let at =
        |index: usize, wanted: &[u8]| wanted.contains(text.as_bytes().get(index)?).then_some(());
    at(4, b"-")?;
    at(7, b"-")?;
    at(10, b"T ")?;
    at(13, b":")?;
    at(16, b":")?;
    let (year, month, day) = (part(0, 4)?, part(5, 7)?, part(8, 10)?);
    let (hour, minute, second) = (part(11, 13)?, part(14, 16)?, part(17, 19)?);
    let sound = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 61;
    let rest = text.get(19..).filter(|_| sound && year >= 1970)?;
    let (fraction, zone) = fraction(rest)?;
    let seconds = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    Some((seconds - offset(zone)?) * SECOND + fraction)
}

/// Returns the microseconds after the seconds, and what follows them.
fn fraction(rest: &str) -> Option<(i64, &str)> {
    let Some(digits) = rest.strip_prefix(['.', ',']) else { return Some((0, rest)) };
    let count = digits.bytes().take_while(u8::is_ascii_digit).count();
    let padded = format!("{:0<6}", &digits[..count]);
    Some((padded.get(..6)?.parse().ok()?, &digits[count..]))
}

/// Returns the seconds that a zone is ahead of UTC.
fn offset(zone: &str) -> Option<i64> {
    let zone = zone.trim();
    if zone.is_empty() || zone == "Z" || zone == "z" || zone == "UTC" {
        return Some(0);
    }
    let sign = match zone.as_bytes()[0] {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let digits: String = zone[1..].chars().filter(|letter| *letter != ':').collect();
    let sound = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: i64 = digits.parse().ok().filter(|_| sound)?;
    Some(sign * (number / 100 * 3600 + number % 100 * 60))
}

/// Days since 1970 of a date of the Gregorian calendar, in eras of 400 years that
/// begin on the first of March.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::read;

    #[test]
    fn instants() {
        let micros = 1_764_423_296_000_000;
        for (value, expected) in [
            (json!(1_764_423_296), Some(micros)),
            (json!(1_764_423_296_000_i64), Some(micros)),
            (json!(1_764_423_296.5), Some(micros + 500_000)),
            (json!("2025-11-29 13:34:56"), Some(micros)),
            (json!("2025-11-29T13:34:56.25Z"), Some(micros + 250_000)),
            (json!("2025-11-29T15:34:56+02:00"), Some(micros)),
            (json!("2024-02-29 00:00:00"), Some(1_709_164_800_000_000)),
            (json!("2025-13-29 13:34:56"), None),
            (json!("yesterday"), None),
            (json!(0), None),
            (json!(null), None),
        ] {
            assert_eq!(read(&value), expected, "{value}");
        }
    }
}
