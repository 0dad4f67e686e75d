//! What only the words before it give away: telephone numbers as they are written at
//! home, and passwords that somebody thought up. Alone they look like any number and
//! any word.

use std::ops::Range;

/// Digits of a telephone number, and of the shortest one.
const DIGITS: std::ops::RangeInclusive<usize> = 6..=15;

/// A number after a word that announces one. No line ends in between.
pub(super) const PHONE: &str = concat!(
    r"(?i)\b(?:tel|telefono?|tel[ée]fono|t[ée]l[ée]phone|phone|mobil|mobile|m[óo]vil|handy",
    r"|cell[ -]?phone|cell(?: number)|fax|whatsapp|sms|rufnummer",
    r"|(?:call|ring|text|phone|reach) (?:me|us|him|her|them)",
    r"|(?:erreichbar|anrufen|anruf|an) unter)",
    r"(?:[ -]?(?:numbers?|nummer|no|nr|num))?\.?",
    r#"(?:["'\\]*[ \t]{0,2}(?:[:=#]|\b(?:at|on|is|ist|under|unter|lautet)\b)){0,2}[ \t]{0,2}["'\\]*"#,
    r"(\(?[0-9][0-9 .\-()/\x{a0}]{4,22}[0-9])"
);

/// A word after one that announces a password.
pub(super) const PASSWORD: &str = concat!(
    r"(?i)(?:password|passwd|passwort|kennwort|passphrase|passcode|pwd|contraseña|mot de passe)",
    r#"[0-9]?["'\\]*(?:[ \t]{0,3}(?::|=>?|\b(?:is|was|ist|war|lautet)\b)){1,2}[ \t]{0,3}["'\\]*"#,
    r#"([^\s"'`,;<>\\(){}\[\]]{4,})"#
);

/// Narrows a match of [`PHONE`], or refuses it: a date, a round amount, too few or
/// too many digits.
pub(super) fn phone(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let mut end = range.start;
    let mut count = 0;
    for (at, letter) in text[range.clone()].char_indices() {
        if letter.is_ascii_digit() {
            (end, count) = (range.start + at + 1, count + 1);
        }
    }
    let found = &text[range.start..end];
    let closed = !text[end..].starts_with(char::is_alphanumeric);
    let sound = closed && DIGITS.contains(&count) && !is_date(found) && !is_round(found);
    (sound && (is_national(found) || (count > 6 && is_announced(&text[..range.start], found))))
        .then_some(range.start..end)
}

/// Tells whether a value alone looks like a telephone number, of which only the name
/// of its member tells that it is one.
pub(super) fn is_phone_member(name: &str, value: &str) -> bool {
    let name = name.to_lowercase();
    let telling = ["phone", "telefon", "teléfono", "mobile", "handy", "fax"];
    let telling = name == "tel" || telling.iter().any(|word| name.contains(word));
    let value = value.trim();
    let marks = |letter: char| letter.is_ascii_digit() || " .-()/+\u{a0}".contains(letter);
    let digits = value.bytes().filter(u8::is_ascii_digit).count();
    telling && value.chars().all(marks) && DIGITS.contains(&digits) && !is_date(value)
}

/// A number that begins as one does that is dialled at home.
fn is_national(number: &str) -> bool {
    number.starts_with(['0', '('])
}

/// Whether more than a bare word like `phone` stands before a number that begins as
/// any number may, or its own marks show what it is.
fn is_announced(before: &str, number: &str) -> bool {
    let before = before.trim_end_matches([' ', '\t', '"', '\'', '\\']).to_lowercase();
    let ends = ["at", "on", "is", "ist", "under", "unter", "lautet", "me", "us", "him", "her"];
    let ends = ends.iter().chain(&["them", "number", "nummer"]);
    let mut ends = ends.map(|word| format!(" {word}"));
    let digits = number.bytes().filter(u8::is_ascii_digit).count();
    before.ends_with([':', '=', '#'])
        || ends.any(|end| before.ends_with(&end))
        || number.contains(['-', '/'])
        || digits >= 10
}

fn groups(number: &str) -> Vec<&str> {
    number.split(|letter: char| !letter.is_ascii_digit()).filter(|it| !it.is_empty()).collect()
}

fn is_year(group: &str) -> bool {
    group.len() == 4 && (group.starts_with("19") || group.starts_with("20"))
}

/// A day, with or without a time behind it, or a list of years.
fn is_date(number: &str) -> bool {
    let groups = groups(number);
    let small = |group: &&str| group.len() <= 2;
    match groups.as_slice() {
        [year, month, day, ..] if is_year(year) => {
            (small(month) && small(day)) || groups.iter().all(|group| is_year(group))
        }
        [day, month, year, ..] if is_year(year) => small(day) && small(month),
        [from, to] => is_year(from) && is_year(to),
        _ => false,
    }
}

/// An amount in thousands.
fn is_round(number: &str) -> bool {
    let groups = groups(number);
    let zeros = number.bytes().rev().take_while(|byte| *byte == b'0').count();
    (groups.len() > 1 && groups[1..].iter().all(|group| *group == "000"))
        || (groups.len() == 1 && zeros >= 5)
}

/// Narrows a match of [`PASSWORD`], or refuses it: without a digit or another mark
/// it is as likely a word about passwords.
pub(super) fn password(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let value = text[range.clone()].trim_end_matches(['.', ':', '!', '?']);
    let range = range.start..range.start + value.len();
    let before = text[..range.start].trim_end_matches([' ', '\t', '"', '\'', '\\']);
    let assigned = before.ends_with([':', '=', '>']);
    let has = |test: fn(&char) -> bool| value.chars().any(|letter| test(&letter));
    let (letters, digits) = (has(|it| it.is_alphabetic()), has(char::is_ascii_digit));
    let marked = has(|it| "!@#$%^&*?+~".contains(*it));
    let spelled = if letters { digits || marked } else { assigned && digits };
    (value.chars().count() >= 4
        && spelled
        && !is_reference(text, value, range.end)
        && !is_span(value))
    .then_some(range)
}

/// A variable, a path, an address, a call: what names a password elsewhere.
fn is_reference(text: &str, value: &str, end: usize) -> bool {
    let names: Vec<&str> = value.split('.').collect();
    let is_name = |name: &&str| {
        name.starts_with(|first: char| first.is_alphabetic() || first == '_')
            && name.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
    };
    value.starts_with(['$', '/', '%', '~', '*', '.', '&'])
        || value.contains("://")
        || text[end..].starts_with(['(', '[', '{', '<'])
        || (names.len() > 1 && names.iter().all(is_name))
}

/// Lengths such as `8-16`, and versions.
fn is_span(value: &str) -> bool {
    let groups = groups(value);
    groups.len() > 1
        && groups.iter().all(|group| group.len() <= 2)
        && value.chars().all(|letter| letter.is_ascii_digit() || "-–.".contains(letter))
}

#[cfg(test)]
mod tests {
    use super::super::patterns::usual;
    use super::super::spans::{Pattern, find};
    use super::is_phone_member;

    fn patterns() -> Vec<Pattern> {
        usual(false).unwrap_or_default()
    }

    fn kinds(patterns: &[Pattern], text: &str) -> Vec<(String, String)> {
        let found = find(patterns, text, false).into_iter();
        found
            .map(|span| (patterns[span.pattern].name.clone(), text[span.range].to_owned()))
            .collect()
    }

    #[test]
    fn numbers_after_a_telling_word() {
        let patterns = patterns();
        for (text, number) in [
            ("tel: 030/1234567", "030/1234567"),
            ("Tel. 030 1234567, Berlin", "030 1234567"),
            ("phone 0171 5556789.", "0171 5556789"),
            ("Telefon: 0171-5556789", "0171-5556789"),
            ("Telefonnummer ist 0171 5556789", "0171 5556789"),
            ("Ruf mich an unter 0171 5556789!", "0171 5556789"),
            ("my mobile is 07700 900123", "07700 900123"),
            ("Mobil: (030) 123 45 67", "(030) 123 45 67"),
            ("call me at 555-1234", "555-1234"),
            ("Call me at 4155552671", "4155552671"),
            ("call me: 415 555 2671", "415 555 2671"),
            ("text me on 07700900123", "07700900123"),
            ("phone number: 612 345 678", "612 345 678"),
            ("téléphone : 01 23 45 67 89", "01 23 45 67 89"),
            ("Handynummer 0160/98765432", "0160/98765432"),
            ("\"phone\": \"030 1234567\"", "030 1234567"),
            ("phone=030 1234567", "030 1234567"),
        ] {
            assert_eq!(kinds(&patterns, text), [("phone".to_owned(), number.to_owned())], "{text}");
        }
    }

    #[test]
    fn numbers_that_are_none() {
        let patterns = patterns();
        for text in [
            "call me at 10:30 or at 1700 hours",
            "call me at 2025-11-29 10:15",
            "call me on 12.05.2025, text me on 29/11/2025",
            "phone: 1.000.000 sold, mobile: 5000000 users",
            "mobile 2019 2020 2021",
            "mobile: 2019 - 2021",
            "phone 1234567 was made on Monday",
            "iPhone 1234567890, a hotel 0123456",
            "the mobile app has 0123456 stars",
            "phone 0001234567890123456789",
            "phone: 03012345ab, version 0123456",
            "tel: 12345",
            "order 030/1234567",
        ] {
            assert_eq!(kinds(&patterns, text), [], "{text}");
        }
    }

    #[test]
    fn passwords_after_a_telling_word() {
        let patterns = patterns();
        for (text, word) in [
            ("password: hunter2", "hunter2"),
            ("Password is hunter2.", "hunter2"),
            ("passwort=geheim1!", "geheim1"),
            ("Das Passwort ist Sommer2024", "Sommer2024"),
            ("pwd hunter2, pwd: hunter2", "hunter2"),
            ("DB_PASSWORD='p@ssword'", "p@ssword"),
            ("password: 123456", "123456"),
            ("\"password\": \"letmein99\"", "letmein99"),
            ("mysql --password=r00t db", "r00t"),
            ("Kennwort lautet: Blume7", "Blume7"),
        ] {
            assert_eq!(
                kinds(&patterns, text),
                [("password".to_owned(), word.to_owned())],
                "{text}"
            );
        }
    }

    #[test]
    fn words_about_passwords() {
        let patterns = patterns();
        for text in [
            "the password is required, the password was changed",
            "password: string, password: str = Field(...), password: required!",
            "password=password, pwd=config.db2, password=getpass2()",
            "password: $PASS1, password=%s1, pwd=/home/user1, pwd: ~/code2",
            "password: {{secret1}}, password=<your1>",
            "password: ********",
            "password: 8-16 characters, the password is 12345678 bits",
            "password: ftp://a.b/1",
            "password length: 1234, passwords: 1234, forgot my password 12345",
            "password: [redacted:secret]",
        ] {
            assert_eq!(kinds(&patterns, text), [], "{text}");
        }
    }

    #[test]
    fn members_that_hold_numbers() {
        for (name, value) in
            [("phone", "0301234567"), ("mobilePhone", "415-555-2671"), ("tel", "030/12 34 56")]
        {
            assert!(is_phone_member(name, value), "{name}");
        }
        for (name, value) in [
            ("phone", "2025-11-29"),
            ("phone", "12345"),
            ("telemetry", "0301234567"),
            ("phone", "model 0301234567"),
            ("order", "0301234567"),
        ] {
            assert!(!is_phone_member(name, value), "{name}");
        }
    }
}
