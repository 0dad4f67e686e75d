//! What a store's own errors mean for us.

use std::error::Error as Cause;

use super::Error;

impl Error {
    /// Sorts an error by what can be done about it.
    pub(super) fn of(url: &str, error: object_store::Error) -> Self {
        use object_store::Error as Theirs;
        let url = url.to_owned();
        match &error {
            Theirs::NotFound { .. } => Self::NotThere { url },
            Theirs::AlreadyExists { .. } => Self::Exists { url },
            Theirs::Precondition { .. } | Theirs::NotModified { .. } => {
                Self::Changed { url, problem: "it was replaced meanwhile".to_owned() }
            }
            Theirs::PermissionDenied { .. }
            | Theirs::Unauthenticated { .. }
            | Theirs::NotSupported { .. }
            | Theirs::NotImplemented { .. }
            | Theirs::InvalidPath { .. }
            | Theirs::UnknownConfigurationKey { .. } => {
                Self::Refused { url, problem: deepest(&error) }
            }
            _ => match refusal(&error) {
                Some(problem) => Self::Refused { url, problem },
                None => Self::Away { url, problem: deepest(&error) },
            },
        }
    }
}

/// Words of `object_store` before a status; the type of that error is its own secret.
const STATUS: &str = "non-2xx status code: ";
/// Words of a redirect to another region.
const REGION: &str = "incorrectly configured region";

/// Returns why the store will not do it, however often it is asked.
fn refusal(error: &object_store::Error) -> Option<String> {
    let problem = deepest(error);
    let status = problem.split_once(STATUS).and_then(|(_, rest)| rest.get(..3)?.parse().ok());
    let refused = match status {
        Some(408 | 425 | 429) => false,
        // 501: the server does not know how, and will not learn it.
        Some(status) => (400..500).contains(&status) || status == 501,
        None => problem.contains(REGION),
    };
    refused.then_some(problem)
}

/// Returns the last cause, which says what happened without our own retries.
fn deepest(error: &object_store::Error) -> String {
    let mut last: &dyn Cause = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    // An answer on one line of talk.
    plain(&last.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Takes out of an answer in XML what it says.
fn plain(problem: &str) -> String {
    let part = |name: &str| {
        let (_, rest) = problem.split_once(&format!("<{name}>"))?;
        rest.split_once(&format!("</{name}>")).map(|(text, _)| text.trim().trim_end_matches('.'))
    };
    let begin = problem.find("<?xml").or_else(|| problem.find("<Error>"));
    match (begin, part("Message"), part("Code")) {
        (Some(begin), Some(message), Some(code)) if message != code => {
            format!("{}{message} ({code})", &problem[..begin])
        }
        (Some(begin), _, Some(code)) => format!("{}{code}", &problem[..begin]),
        _ => problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn an_answer_in_xml_is_a_line() {
        let status = "Server returned non-2xx status code: 404 Not Found: ";
        let xml = "<?xml version=\"1.0\" encoding=\"UTF-8\"?> <Error><Code>NoSuchBucket</Code>\
                   <Message>The specified bucket does not exist.</Message>\
                   <BucketName>chats</BucketName></Error>";
        let said = "The specified bucket does not exist (NoSuchBucket)";
        assert_eq!(plain(&format!("{status}{xml}")), format!("{status}{said}"));
        let twice = "<Error><Code>SlowDown</Code><Message>SlowDown</Message></Error>";
        assert_eq!(plain(twice), "SlowDown");
        for other in ["connection refused", "502: <html>bad gateway</html>", "<Error>"] {
            assert_eq!(plain(other), other);
        }
    }
}
