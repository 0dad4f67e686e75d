//! The closed vocabularies of the schema: string columns in which only these
//! words may stand.

/// The finish reason of an imported answer whose log does not say one: it stands
/// for nothing that a server said.
pub const UNTOLD_FINISH_REASON: &str = "imported";

/// A closed set of words that is stored as text.
pub trait Word: Sized + Copy + 'static {
    /// Every word, in the order of the documentation.
    const ALL: &'static [Self];

    /// Returns the word as it stands in the file.
    fn as_str(self) -> &'static str;

    /// Returns the value of a word, or nothing if it is not in the set.
    fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|word| word.as_str() == text)
    }
}

impl LogProbKind {
    /// Returns the kind by whether the logits are divided by the temperature first, if
    /// that is known.
    pub fn of(tempered: Option<bool>) -> Self {
        match tempered {
            Some(true) => Self::Tempered,
            Some(false) => Self::Raw,
            None => Self::Unknown,
        }
    }
}

macro_rules! words {
    ($(#[doc = $about:literal] $name:ident { $(#[doc = $meaning:literal] $variant:ident = $text:literal,)* })*) => {$(
        #[doc = $about]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $(#[doc = $meaning] $variant,)* }

        impl Word for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];

            fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }
    )*};
}

words! {
    /// Where a session id came from.
    SessionSource {
        /// `X-Session-Id` or the body's `session_id`.
        Header = "header",
        /// The client's affinity headers.
        Affinity = "affinity",
        /// `prompt_cache_key` or the reference's body fields.
        Body = "body",
        /// The messages extend a recorded turn.
        Inferred = "inferred",
        /// Nothing told; the turn opened a session of its own.
        None = "none",
    }
    /// Who said which weights were at work.
    WeightVersionSource {
        /// The answer itself carried the version.
        Answer = "answer",
        /// The engine was asked before the first byte and after the last.
        Polled = "polled",
        /// Nobody could tell.
        None = "none",
    }
    /// How an answer ended.
    Status {
        /// The model ended it, or a stop string did.
        Complete = "complete",
        /// The token limit ended it.
        Truncated = "truncated",
        /// The client, or the engine, gave up on it.
        Aborted = "aborted",
        /// The engine reported an error.
        Failed = "failed",
    }
    /// Where the token ids of a row came from.
    TokenSource {
        /// The engine that sampled them said so.
        Engine = "engine",
        /// They were made again from the text: never trained on.
        Retokenized = "retokenized",
        /// There are none.
        None = "none",
    }
    /// What came after a turn.
    NextStateKind {
        /// The user's next message.
        User = "user",
        /// All results of the turn's tool calls.
        Tool = "tool",
        /// Only explicit feedback.
        Explicit = "explicit",
        /// Nothing.
        None = "none",
    }
    /// What a recorded log-prob is the logarithm of.
    LogProbKind {
        /// Softmax of the logits themselves.
        Raw = "raw",
        /// Softmax of the logits divided by the sampling temperature.
        Tempered = "tempered",
        /// The server did not say.
        Unknown = "unknown",
    }
    /// Which signals a row carries, whatever the estimator.
    SampleKind {
        /// A usable hint and a reward that is not 0.
        OpdRl = "opd+rl",
        /// A usable hint only.
        Opd = "opd",
        /// A reward only.
        Rl = "rl",
        /// No signal; the row is kept and masked.
        None = "none",
    }
    /// Where a reward came from.
    RewardSource {
        /// A person or program said it by number.
        Explicit = "explicit",
        /// The judge's majority.
        Judged = "judged",
        /// The outcome at the end of the session.
        Outcome = "outcome",
        /// A sum of these, weighted.
        Mixed = "mixed",
    }
}

macro_rules! when_nothing_is_known {
    ($($name:ident::$variant:ident),*) => {$(
        impl Default for $name {
            fn default() -> Self {
                Self::$variant
            }
        }
    )*};
}

when_nothing_is_known!(
    SessionSource::None,
    WeightVersionSource::None,
    Status::Failed,
    TokenSource::None,
    NextStateKind::None,
    LogProbKind::Unknown
);
