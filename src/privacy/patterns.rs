//! The patterns that are always looked for. Each has a check beside its
//! expression, so that plain numbers, times and ids are left alone.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use super::Error;
use super::spans::{Check, Pattern};
use super::told;

const PRIVATE_KEY: &str = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)";
const JWT: &str = r"eyJ[A-Za-z0-9_-]{5,}\.eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*";
const AWS: &str = r"(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}";
/// The shapes of OpenAI, Anthropic, GitHub, GitLab, Slack, Hugging Face, Google,
/// npm, PyPI, Stripe, SendGrid, Groq, xAI, Replicate, DigitalOcean, Tailscale,
/// Telegram.
const API_KEY: &str = concat!(
    r"(?i:sk)-[A-Za-z0-9_-]{20,}|(?i:gh[pousr]_)[A-Za-z0-9]{30,}|(?i:github_pat_)[A-Za-z0-9_]{22,}",
    r"|(?i:glpat)-[A-Za-z0-9_-]{20,}|(?i:xox[abeposr])-[A-Za-z0-9-]{10,}|(?i:hf_)[A-Za-z0-9]{30,}",
    r"|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}|(?i:npm_)[A-Za-z0-9]{36}",
    r"|(?i:pypi)-[A-Za-z0-9_-]{50,}|(?i:[srp]k_(?:live|test)_)[A-Za-z0-9]{16,}",
    r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{40,}|r8_[A-Za-z0-9]{30,}|do[por]_v1_[a-f0-9]{64}",
    r"|tskey-[A-Za-z0-9-]{16,}|[0-9]{8,10}:AA[A-Za-z0-9_-]{33}"
);
const BEARER: &str = r"(?i)\b(?:bearer|basic)\s+([A-Za-z0-9._~+/=-]{16,})";
const PASSWORD: &str = r#"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@"']*:([^\s/@"']+)@"#;
const SECRET: &str = concat!(
    r"(?i)(?:api[_\- ]?key|secret|token|passw(?:or)?d|passphrase|pwd|credential|authorization",
    r"|(?:auth|access|private|signing|encryption)[_\- ]?key)[a-z_\-]*",
    r#"["'\\]*\s{0,3}(?::|=>?|\bis\b)\s{0,3}["'\\]*([^\s"'`,;<>\\(){}\[\]]{12,})"#
);
/// All pairs of a cookie's header, which may stand in quotes.
const COOKIE: &str = concat!(
    r#"(?i)\b(?:set-)?cookie["'\\]*\s{0,3}[:=]\s{0,3}["'\\]*"#,
    r#"([a-z0-9_.!$*+~-]+=[^;\s"'\\,]{4,}(?:;\s{0,3}[a-z0-9_.!$*+~-]+=[^;\s"'\\,]*)*)"#
);
const EMAIL: &str = r"[\p{L}\p{N}._%+-]+@[\p{L}\p{N}-]+(?:\.[\p{L}\p{N}-]+)*\.\p{L}{2,}";
const CARD: &str = r"[2-6][0-9](?:[ -]?[0-9]){11,17}";
const PHONE: &str = concat!(
    r"\+[1-9][0-9 .\-()/\x{a0}]{6,22}[0-9]|00[1-9][0-9]{0,2}[ .\-/][0-9 .\-/()]{5,20}[0-9]",
    r"|\([2-9][0-9]{2}\) ?[0-9]{3}-[0-9]{4}|[2-9][0-9]{2}[-.][0-9]{3}[-.][0-9]{4}"
);
const ADDRESS: &str = r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}";

/// Words in the name of a member whose value is a secret.
const TELLING: [&str; 13] = [
    "apikey",
    "secret",
    "token",
    "password",
    "passwd",
    "passwort",
    "kennwort",
    "passphrase",
    "pwd",
    "credential",
    "authorization",
    "accesskey",
    "privatekey",
];

/// Returns the patterns, the surest first. Addresses of machines only if wanted.
pub(super) fn usual(addresses: bool) -> Result<Vec<Pattern>, Error> {
    let list: [(&str, &str, Check, bool); 10] = [
        ("private_key", PRIVATE_KEY, |_, range| Some(range), true),
        ("jwt", JWT, apart, true),
        ("aws_key", AWS, apart, true),
        ("api_key", API_KEY, with_digit, true),
        ("bearer", BEARER, random, true),
        ("password", PASSWORD, |_, range| Some(range), true),
        ("cookie", COOKIE, |_, range| Some(range), true),
        ("email", EMAIL, |_, range| Some(range), true),
        ("card", CARD, card, false),
        ("phone", PHONE, phone, false),
    ];
    let mut patterns = Vec::new();
    for (name, regex, check, everywhere) in list {
        patterns.push(Pattern::new(name, regex, check, everywhere)?);
    }
    patterns.push(Pattern::new("secret", SECRET, random, true)?);
    patterns.push(Pattern::new("password", told::PASSWORD, told::password, true)?);
    patterns.push(Pattern::new("phone", told::PHONE, told::phone, false)?);
    if addresses {
        patterns.push(Pattern::new("ip", ADDRESS, address, false)?);
    }
    Ok(patterns)
}

/// Tells whether a member's name and value are those of a secret.
pub(super) fn is_secret_member(name: &str, value: &str) -> bool {
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.to_ascii_lowercase();
    let telling = TELLING.iter().any(|word| plain.contains(word));
    let password = ["password", "passwd", "passwort", "kennwort", "pwd", "passphrase", "secret"];
    let password = password.iter().any(|word| plain.contains(word));
    let spelled = value.len() >= 6
        && !value.contains(char::is_whitespace)
        && value.bytes().any(|byte| byte.is_ascii_digit());
    let cookie = ["cookie", "setcookie"].contains(&plain.as_str()) && value.contains('=');
    cookie || telling && (is_random(value) || (password && spelled))
}

fn before(text: &str, at: usize) -> Option<char> {
    text[..at].chars().next_back()
}

fn after(text: &str, at: usize) -> Option<char> {
    text[at..].chars().next()
}

fn apart(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let joined = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_alphanumeric());
    (!joined(before(text, range.start))).then_some(range)
}

fn with_digit(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let digit = text[range.clone()].bytes().any(|byte| byte.is_ascii_digit());
    apart(text, range).filter(|_| digit)
}

fn random(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    // A sentence's full stop is not the secret's.
    let trimmed = text[range.clone()].trim_end_matches(['.', ':', '!', '?']);
    let range = range.start..range.start + trimmed.len();
    is_random(trimmed).then_some(range)
}

/// Tells whether a text looks drawn, not written: long, varied, letters and
/// digits mixed.
fn is_random(text: &str) -> bool {
    let has = |test: fn(&u8) -> bool| text.as_bytes().iter().any(test);
    let mixed = has(u8::is_ascii_digit) && has(u8::is_ascii_alphabetic);
    let cased = text.len() >= 24 && has(u8::is_ascii_uppercase) && has(u8::is_ascii_lowercase);
    text.len() >= 12
        && (mixed || cased)
        && !text.contains(char::is_whitespace)
        && entropy(text) >= 3.0
}

/// Bits per byte.
fn entropy(text: &str) -> f64 {
    let mut counts = [0_u32; 256];
    text.bytes().for_each(|byte| counts[usize::from(byte)] += 1);
    let total = text.len() as f64;
    let shares = counts.iter().filter(|count| **count > 0).map(|count| f64::from(*count) / total);
    -shares.map(|share| share * share.log2()).sum::<f64>()
}

/// A card's number: its first digits and length are an issuer's, its sum is right.
fn card(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let joined = |letter: char| letter.is_alphanumeric() || "._-+#/".contains(letter);
    if before(text, range.start).is_some_and(joined) {
        return None;
    }
    let places: Vec<(usize, u32)> = text[range.clone()]
        .char_indices()
        .filter_map(|(at, letter)| Some((range.start + at, letter.to_digit(10)?)))
        .collect();
    let ends = |count: usize| {
        let end = places.get(count - 1)?.0 + 1;
        let digits: Vec<u32> = places[..count].iter().map(|(_, digit)| *digit).collect();
        let closed = after(text, end).is_none_or(|letter| !letter.is_alphanumeric());
        (closed && issued(&digits) && luhn(&digits)).then_some(range.start..end)
    };
    (13..=places.len().min(19)).rev().find_map(ends)
}

fn issued(digits: &[u32]) -> bool {
    let head = |count: usize| digits[..count].iter().fold(0, |number, digit| number * 10 + digit);
    match digits.len() {
        13 | 19 => head(1) == 4,
        14 => matches!(head(2), 36 | 38) || (300..=305).contains(&head(3)),
        15 => matches!(head(2), 34 | 37),
        16 => {
            head(1) == 4
                || (51..=55).contains(&head(2))
                || (2221..=2720).contains(&head(4))
                || head(4) == 6011
                || head(2) == 65
                || (3528..=3589).contains(&head(4))
        }
        _ => false,
    }
}

fn luhn(digits: &[u32]) -> bool {
    let doubled = |(place, digit): (usize, &u32)| match place % 2 {
        0 => *digit,
        _ if *digit > 4 => digit * 2 - 9,
        _ => digit * 2,
    };
    digits.iter().rev().enumerate().map(doubled).sum::<u32>() % 10 == 0
}

/// A telephone number in an international form, or as North America writes it.
fn phone(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let joined = |letter: char| letter.is_alphanumeric() || "+=/.-_#@".contains(letter);
    if before(text, range.start).is_some_and(joined) {
        return None;
    }
    let mut count = 0;
    let mut end = range.start;
    for (at, letter) in text[range.clone()].char_indices() {
        // More digits than a number can have belong to something else.
        if letter.is_ascii_digit() && count == 15 {
            break;
        }
        if letter.is_ascii_digit() {
            count += 1;
            end = range.start + at + 1;
        }
    }
    let closed = after(text, end).is_none_or(|letter| !letter.is_alphanumeric());
    (count >= 8 && closed).then_some(range.start..end)
}

fn address(text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let joined = |letter: char| letter.is_ascii_alphanumeric() || ".:".contains(letter);
    let found = &text[range.clone()];
    let known =
        found.parse::<Ipv4Addr>().is_ok() || (found.parse::<Ipv6Addr>().is_ok() && found.len() > 2);
    let free = !before(text, range.start).is_some_and(joined)
        && !after(text, range.end).is_some_and(|letter| letter.is_ascii_alphanumeric());
    (known && free).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::super::spans::{Pattern, find};

    fn kinds(text: &str) -> Vec<(String, String)> {
        let patterns: Vec<Pattern> = super::usual(true).unwrap_or_default();
        let found = find(&patterns, text, false).into_iter();
        found
            .map(|span| (patterns[span.pattern].name.clone(), text[span.range].to_owned()))
            .collect()
    }

    #[test]
    fn what_is_found() {
        let key = format!("sk-{}", "aB3dE6gH9jK2mN5pQ8sT");
        for (text, kind, expected) in [
            ("mail bob.smith+x@mail.example.co.uk.", "email", "bob.smith+x@mail.example.co.uk"),
            ("call +49 (0)151 234-56789 today", "phone", "+49 (0)151 234-56789"),
            ("call 0049 151 23456789.", "phone", "0049 151 23456789"),
            ("call (415) 555-2671", "phone", "(415) 555-2671"),
            ("+14155552671", "phone", "+14155552671"),
            ("card 4111 1111 1111 1111, exp 12/29", "card", "4111 1111 1111 1111"),
            ("4111111111111111 123", "card", "4111111111111111"),
            ("378282246310005", "card", "378282246310005"),
            ("AKIAIOSFODNN7EXAMPLE", "aws_key", "AKIAIOSFODNN7EXAMPLE"),
            ("password = x7Kq9ZtR4mLp", "secret", "x7Kq9ZtR4mLp"),
            (
                "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
                "secret",
                "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            ),
            ("Authorization: Bearer abcDEF123456ghiJKL78", "bearer", "abcDEF123456ghiJKL78"),
            ("postgres://me:hunter2@db/x", "password", "hunter2"),
            ("at 192.168.10.3 now", "ip", "192.168.10.3"),
            ("at 2001:db8::8a2e:370:7334 now", "ip", "2001:db8::8a2e:370:7334"),
            (key.as_str(), "api_key", key.as_str()),
            ("SK-PROJ-A1B2C3D4E5F6G7H8I9J0", "api_key", "SK-PROJ-A1B2C3D4E5F6G7H8I9J0"),
            ("-H 'Cookie: sid=s3cr3t; t=1'", "cookie", "sid=s3cr3t; t=1"),
            ("Set-Cookie: sid=s3cr3t; HttpOnly", "cookie", "sid=s3cr3t"),
            (r"to jane.doe\u0040example.com, ", "email", r"jane.doe\u0040example.com"),
            (r#"{"to": "jane\\u0040example.com", "b"#, "email", r"jane\\u0040example.com"),
            (r"first\njane@example.com\nlast", "email", "jane@example.com"),
            ("?to=jane.doe%40example.com&b=1", "email", "jane.doe%40example.com"),
            ("?to=jane%2540example.com", "email", "jane%2540example.com"),
            ("<p>jane&#64;example.com</p>", "email", "jane&#64;example.com"),
            ("<p>jane&commat;example&period;com", "email", "jane&commat;example&period;com"),
            ("<p>jane&#x40;example.com</p>", "email", "jane&#x40;example.com"),
            ("an jane＠example．com.", "email", "jane＠example．com"),
            ("ja\u{200b}ne@exam\u{200b}ple.com", "email", "ja\u{200b}ne@exam\u{200b}ple.com"),
        ] {
            assert_eq!(kinds(text), [(kind.to_owned(), expected.to_owned())], "{text}");
        }
    }

    #[test]
    fn what_is_left_alone() {
        for text in [
            "1764423296 1764423296000 1764423296000123 1764423296000123456",
            "2025-11-29T13:34:56.000123+0100 12:34:56 2025-11-29 13:34",
            "550e8400-e29b-41d4-a716-446655440000 chatcmpl-9f8e7d6c5b4a",
            "4111111111111112 order 1234567890123456 invoice 2025001234",
            "3.14159265358979 1+12345678901 a=+4 version 1.2.3 10.5",
            "the token is configured, the password is required",
            "bearer of bad news, basic responsibilities",
            "pkg@1.2.3 @scope/name user@localhost",
            r"C:\new\temp %20 &amp; 100 %, the cookie: it was eaten",
            "sk-learn-is-a-python-library-for-machine-learning",
            "max_tokens: 4096, tokens = 123456789012",
            "[redacted:email] token: [redacted:api_key]",
        ] {
            assert_eq!(kinds(text), [], "{text}");
        }
    }
}
