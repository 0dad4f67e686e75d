//! The column table and the row struct that is made from it.

use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::compute::{CastOptions, can_cast_types, cast_with_options};
use arrow::datatypes::{DataType, Field, FieldRef, Schema};

use super::cell::Cell;
pub use super::cell::Micros;
use super::words::{
    LogProbKind, NextStateKind, RewardSource, SampleKind, SessionSource, Status, TokenSource,
    WeightVersionSource,
};
use super::{Column, Error};

/// The sampling settings that were in force, as far as the server told.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sampling {
    /// Softmax temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus bound.
    pub top_p: Option<f32>,
    /// Number of ids kept; 0 or -1 is all.
    pub top_k: Option<i32>,
    /// Bound relative to the most likely id.
    pub min_p: Option<f32>,
    /// Seed of the sampler.
    pub seed: Option<i64>,
    /// Limit on new tokens.
    pub max_tokens: Option<u32>,
    /// What `rollout_log_probs` are the logarithm of.
    pub log_prob_kind: LogProbKind,
}

/// The stage that writes a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Writer {
    /// `oclaw serve`.
    Serve,
    /// `oclaw judge`.
    Judge,
    /// `oclaw hint`.
    Hint,
    /// `oclaw teacher-lp`.
    TeacherLp,
    /// `oclaw advantage`.
    Advantage,
}

impl Writer {
    /// Returns the subcommand's name.
    pub fn command(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Judge => "judge",
            Self::Hint => "hint",
            Self::TeacherLp => "teacher-lp",
            Self::Advantage => "advantage",
        }
    }
}

macro_rules! required {
    (required) => {
        false
    };
    () => {
        true
    };
}

macro_rules! table {
    ($($writer:ident { $($(@$required:ident)? $name:ident: $type:ty = $meaning:literal,)* })*) => {
        /// One row of the table. The columns of a stage that has not run are
        /// `None`. The default is a row about which nothing is known: an answer
        /// that never came.
        #[derive(Debug, Clone, PartialEq, Default)]
        pub struct Turn {
            $($(
                #[doc = $meaning]
                pub $name: $type,
            )*)*
        }

        /// Returns the whole schema, in file order.
        pub fn columns() -> &'static [Column] {
            static COLUMNS: OnceLock<Vec<Column>> = OnceLock::new();
            COLUMNS.get_or_init(|| vec![$($(Column {
                name: stringify!($name),
                data_type: <$type as Cell>::data_type(),
                nullable: <$type as Cell>::NULLABLE && required!($($required)?),
                writer: Writer::$writer,
                meaning: $meaning,
            },)*)*])
        }

        fn array(name: &str, turns: &[Turn]) -> Option<ArrayRef> {
            match name {
                $($(stringify!($name) => {
                    Some(<$type as Cell>::build(turns.iter().map(|turn| Some(&turn.$name))))
                })*)*
                _ => None,
            }
        }

        impl Turn {
            /// Keeps the columns of one writer and lets go of all others: what a
            /// stage has noted waits for its batch to be done, and the prompt
            /// that it was noted about weighs much more.
            pub fn only(self, writer: Writer) -> Self {
                match writer {
                    $(Writer::$writer => Self { $($name: self.$name,)* ..Self::default() },)*
                }
            }
        }

        /// Reads every row of a batch. Columns that the schema does not know
        /// are left alone.
        pub fn read(batch: &RecordBatch) -> Result<Vec<Turn>, Error> {
            $($(
                let column = stringify!($name);
                if <$type as Cell>::null().is_none() && batch.column_by_name(column).is_none() {
                    return Err(Error::MissingColumn { column });
                }
            )*)*
            read_part(batch)
        }

        /// Reads every row of a batch that has only some of the columns: what a turn
        /// says of the others is not to be used.
        pub fn read_part(batch: &RecordBatch) -> Result<Vec<Turn>, Error> {
            $($(let $name = Reader::<$type>::new(batch, stringify!($name))?;)*)*
            (0..batch.num_rows())
                .map(|row| Ok(Turn { $($($name: $name.get(row)?,)*)* }))
                .collect()
        }
    };
}

table! {
    Serve {
        session_id: String = "conversation this turn belongs to; data only, never a path",
        turn: u32 = "recorded ancestors + 1",
        turn_id: String = "uuid v7 of this row",
        parent_turn_id: Option<String> = "turn whose answer this request extends",
        branch: String = "line of the conversation; an edit or a regeneration opens a new one",
        request_id: String = "one HTTP request; all choices of it share this id",
        choice: u8 = "index among the request's choices",
        client: Option<String> = "name of the client key that was used",
        session_source: SessionSource = "where the session id came from",
        session_confidence: f32 = "1 for a stated session, less for an inferred one",
        created_at: Micros = "request received, UTC",
        finished_at: Micros = "answer complete, UTC",
        model: String = "model name as the client wrote it",
        weight_version: Option<String> = "policy step at the start of generation",
        weight_version_end: Option<String> = "policy step at the end of generation",
        weight_version_source: WeightVersionSource = "who said which version it was",
        sampling: Sampling = "sampling settings in force",
        messages: String = "request messages, JSON",
        tools: Option<String> = "tool definitions of the request, JSON",
        response: String = "assistant message, JSON",
        finish_reason: Option<String> = "stop, length, tool_calls, abort … as the server said",
        matched_stop: Option<String> = "stop string or id that ended the answer",
        ends_with_stop_token: Option<bool> = "whether the last of `response_ids` is an end or stop token",
        status: Status = "how the answer ended",
        usage_completion_tokens: Option<u32> = "completion tokens as the server counted them",
        prompt_ids: Option<Vec<i32>> = "token ids of the prompt as the server rendered it",
        response_ids: Option<Vec<i32>> = "token ids of the answer as sampled",
        rollout_log_probs: Option<Vec<Option<f32>>> = "log-prob of each response id as the server gave it, nats",
        token_source: TokenSource = "where the token ids came from",
        untrainable_reason: Option<String> = "why this row must not be trained on",
        next_state: Option<String> = "messages the client appended after this answer, JSON list",
        next_state_kind: NextStateKind = "what kind of next state that is",
        session_end: bool = "whether the session ended with this turn",
        reward_explicit: Option<f32> = "reward that a person or program stated, -1 to 1",
        feedback_text: Option<String> = "words that came with an explicit reward",
    }
    Judge {
        score: Option<f32> = "majority of the votes: 1, 0 or -1; null if nobody voted",
        votes: Option<Vec<Option<i8>>> = "each vote; null is no vote",
        judge_text: Option<Vec<Option<String>>> = "the judge's words behind each vote",
        judge_error: Option<String> = "why there is no score",
    }
    Hint {
        hints: Option<Vec<String>> = "accepted hints, shortest first",
        hint_votes: Option<Vec<Option<i8>>> = "each hint call's verdict; null is no verdict",
        hint_error: Option<String> = "why there is no hint",
    }
    TeacherLp {
        teacher: Option<String> = "model whose log-probs these are",
        teacher_temperature: Option<f32> = "temperature of the teacher's log-probs; 1 is raw",
        student_version: Option<String> = "policy step that chose the student's top-k ids",
        topk: Option<u16> = "k of the top-k columns",
        teacher_log_probs: Option<Vec<Option<Vec<f32>>>> = "per hint: log-prob of each response id under the hinted prompt, nats",
        teacher_topk_ids: Option<Vec<Option<Vec<i32>>>> = "per hint: the teacher's top ids, row-major [R*k]",
        teacher_topk_log_probs: Option<Vec<Option<Vec<f32>>>> = "per hint: log-probs at those ids, row-major [R*k]",
        teacher_at_student: Option<Vec<Option<Vec<f32>>>> = "per hint: the teacher's log-probs at the student's ids, row-major [R*k]",
        student_topk_ids: Option<Vec<i32>> = "the student's top ids under the plain prompt, row-major [R*k]",
        student_topk_log_probs: Option<Vec<f32>> = "log-probs at those ids, row-major [R*k]",
        teacher_error: Option<Vec<Option<String>>> = "per hint: why it has no log-probs",
    }
    Advantage {
        reward: Option<f32> = "resolved reward",
        reward_source: Option<RewardSource> = "where the reward came from",
        @required sample_kind: Option<SampleKind> = "signals that exist, whatever the estimator",
        sample_reason: Option<String> = "why the row carries no signal",
        @required promoted: Option<bool> = "kept by the at-least-one rule",
        loss_mask: Option<Vec<i8>> = "1 where a response token may be trained",
        rl_advantages: Option<Vec<f32>> = "reward part of the advantage per response token",
        advantages: Option<Vec<f32>> = "the chosen estimator's advantage per response token",
        advantage_error: Option<String> = "why there is no advantage",
    }
}

/// Reads one column of a batch, one row at a time.
struct Reader<T> {
    column: &'static str,
    array: Option<ArrayRef>,
    cell: std::marker::PhantomData<T>,
}

impl<T: Cell + Default> Reader<T> {
    fn new(batch: &RecordBatch, column: &'static str) -> Result<Self, Error> {
        let array = match batch.column_by_name(column) {
            None => None,
            Some(array) => Some(conform(array, named(column)?)?),
        };
        Ok(Self { column, array, cell: std::marker::PhantomData })
    }

    fn get(&self, row: usize) -> Result<T, Error> {
        let null = || T::null().ok_or(Error::Null { column: self.column, row });
        match &self.array {
            None => Ok(T::default()),
            Some(array) if array.is_valid(row) => T::read(array, row).map_err(|found| {
                Error::UnknownWord { column: self.column, row, found, wanted: T::vocabulary() }
            }),
            _ => null(),
        }
    }
}

/// Finds a column of the schema by its name.
fn named(name: &'static str) -> Result<&'static Column, Error> {
    let column = columns().iter().find(|column| column.name == name);
    column.ok_or(Error::MissingColumn { column: name })
}

/// Errors unless values of a type can become values of a column's type. Numbers
/// never become text, nor text numbers: that would hide a foreign file.
pub fn check_type(column: &Column, found: &DataType) -> Result<(), Error> {
    let wanted = &column.data_type;
    match found == wanted || (alike(found, wanted) && can_cast_types(found, wanted)) {
        true => Ok(()),
        false => Err(Error::WrongType {
            column: column.name,
            found: found.to_string(),
            wanted: wanted.to_string(),
        }),
    }
}

/// Whether two types differ only in width, encoding or nullability.
fn alike(found: &DataType, wanted: &DataType) -> bool {
    match (found, wanted) {
        (DataType::Null, _) => true,
        (DataType::Dictionary(_, value), _) => alike(value, wanted),
        (
            DataType::List(found)
            | DataType::LargeList(found)
            | DataType::ListView(found)
            | DataType::LargeListView(found)
            | DataType::FixedSizeList(found, _),
            DataType::List(wanted),
        ) => alike(found.data_type(), wanted.data_type()),
        (DataType::Struct(found), DataType::Struct(wanted)) => {
            found.len() == wanted.len()
                && found.iter().zip(wanted).all(|(found, wanted)| {
                    found.name() == wanted.name() && alike(found.data_type(), wanted.data_type())
                })
        }
        (DataType::Timestamp(..), DataType::Timestamp(..)) => true,
        (DataType::Boolean, DataType::Boolean) => true,
        _ if wanted.is_string() => found.is_string(),
        _ if wanted.is_integer() => found.is_integer(),
        _ if wanted.is_floating() => found.is_numeric(),
        _ => false,
    }
}

/// Brings a column of another writer (wider integers, other nullability of list
/// items) to the schema's type, or says why that would lose something.
pub fn conform(array: &ArrayRef, column: &Column) -> Result<ArrayRef, Error> {
    if *array.data_type() == column.data_type {
        return Ok(array.clone());
    }
    check_type(column, array.data_type())?;
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(array, &column.data_type, &options)
        .map_err(|source| Error::Arrow { column: column.name, source })
}

/// Builds the columns of the given stages. Errors if a required value is
/// missing.
pub fn arrays(writers: &[Writer], turns: &[Turn]) -> Result<Vec<(FieldRef, ArrayRef)>, Error> {
    some_arrays(|column| writers.contains(&column.writer), turns)
}

/// Builds some columns likewise.
pub fn some_arrays(
    wanted: impl Fn(&Column) -> bool,
    turns: &[Turn],
) -> Result<Vec<(FieldRef, ArrayRef)>, Error> {
    let mut built = Vec::new();
    for column in columns().iter().filter(|column| wanted(column)) {
        let Some(array) = array(column.name, turns) else {
            return Err(Error::MissingColumn { column: column.name });
        };
        if !column.nullable && array.null_count() > 0 {
            let row = (0..array.len()).find(|row| array.is_null(*row)).unwrap_or_default();
            return Err(Error::Null { column: column.name, row });
        }
        let field = Field::new(column.name, array.data_type().clone(), column.nullable);
        built.push((Arc::new(field), array));
    }
    Ok(built)
}

impl Turn {
    /// Returns when the turn was asked, in microseconds since 1970, if that is known:
    /// an import whose log tells no time has 0.
    pub fn asked_at(&self) -> Option<i64> {
        Some(self.created_at.0).filter(|at| *at > 0)
    }

    /// Takes off what the teacher and the student said token by token, and why a
    /// candidate said nothing.
    pub fn clear_taught_values(&mut self) {
        self.topk = None;
        self.teacher_log_probs = None;
        self.teacher_topk_ids = None;
        self.teacher_topk_log_probs = None;
        self.teacher_at_student = None;
        self.student_topk_ids = None;
        self.student_topk_log_probs = None;
        self.teacher_error = None;
    }
}

/// Builds a record batch that holds the columns of the given stages.
pub fn batch(writers: &[Writer], turns: &[Turn]) -> Result<RecordBatch, Error> {
    let (fields, arrays): (Vec<_>, Vec<_>) = arrays(writers, turns)?.into_iter().unzip();
    let options = RecordBatchOptions::new().with_row_count(Some(turns.len()));
    RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), arrays, &options)
        .map_err(|source| Error::Arrow { column: "*", source })
}
