//! Rows without what must not be kept. Where the words of a prompt, an answer or a
//! hint change, the token ids would still spell them: they go, with everything that
//! is counted by them, and the row says why.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, GenericStringArray, ListBuilder, OffsetSizeTrait, RecordBatch,
    RecordBatchOptions, StringBuilder,
};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};

use super::redact::{Redacted, Redactor};
use super::{Counts, Error};
use crate::table;
use crate::trajectory::words::{SampleKind, TokenSource};
use crate::trajectory::{Turn, Writer, columns, turn};

/// Why a row has no ids any more.
const REASON: &str = "redacted";
const WRITERS: [Writer; 5] =
    [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp, Writer::Advantage];

/// Something that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spot {
    /// Row of the batch.
    pub row: usize,
    /// Column.
    pub column: String,
    /// What was found there, and how often.
    pub counts: Counts,
    /// Whether the row lost its ids for it.
    pub unaligned: bool,
}

/// Rows redacted batch by batch.
#[derive(Debug)]
pub struct Rows {
    schema: SchemaRef,
    redactor: Redactor,
}

/// What is found in one row so far.
#[derive(Debug, Default)]
struct Words {
    found: BTreeMap<String, Counts>,
}

impl Rows {
    /// Prepares for batches of a schema. Errors if a column that is not ours holds
    /// text in a type that cannot be redacted.
    pub fn new(schema: &Schema, redactor: Redactor) -> Result<Self, Error> {
        let mut fields: Vec<FieldRef> = Vec::new();
        for field in schema.fields() {
            let known = columns().iter().find(|column| column.name == field.name());
            match known {
                Some(column) => fields.push(Arc::new(column.field())),
                None if redactable(field.data_type()) => fields.push(field.clone()),
                None => {
                    let (column, found) = (field.name().clone(), field.data_type().to_string());
                    return Err(Error::Column { column, found });
                }
            }
        }
        let mut metadata = schema.metadata().clone();
        for (key, value) in schema.metadata() {
            // What oclaw says of itself the sink writes, redacted by its caller.
            if !key.starts_with("oclaw.")
                && let Some(redacted) = redactor.text(value)
            {
                metadata.insert(key.clone(), redacted.text);
            }
        }
        let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
        Ok(Self { schema, redactor })
    }

    /// Returns the schema of what comes out.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Returns the redactor, for what is told beside the rows.
    pub fn redactor(&mut self) -> &mut Redactor {
        &mut self.redactor
    }

    /// Redacts rows, given also as turns.
    pub fn redact(
        &mut self,
        batch: &RecordBatch,
        mut turns: Vec<Turn>,
    ) -> Result<(RecordBatch, Vec<Spot>), Error> {
        let mut spots = Vec::new();
        for (row, turn) in turns.iter_mut().enumerate() {
            let mut words = Words::default();
            let unaligned = words.turn(&mut self.redactor, turn);
            spots.extend(words.found.into_iter().map(|(column, counts)| Spot {
                row,
                unaligned: unaligned && spells_ids(&column),
                column,
                counts,
            }));
        }
        let mut arrays: Vec<ArrayRef> = batch.columns().to_vec();
        for (place, field) in self.schema.fields().iter().enumerate() {
            if !columns().iter().any(|column| column.name == field.name()) {
                arrays[place] = self.foreign(field, &arrays[place], &mut spots);
            }
        }
        self.put(&mut turns, &mut arrays)?;
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let batch =
            RecordBatch::try_new_with_options(self.schema(), arrays, &options).map_err(encode)?;
        Ok((batch, spots))
    }

    /// Puts the turns' columns in the place of the batch's.
    fn put(&self, turns: &mut [Turn], arrays: &mut [ArrayRef]) -> Result<(), Error> {
        let there = |name: &str| self.schema.column_with_name(name).map(|(place, _)| place);
        let mut writers = Vec::new();
        for writer in WRITERS {
            if columns()
                .iter()
                .any(|column| column.writer == writer && there(column.name).is_some())
            {
                writers.push(writer);
            }
        }
        if there("sample_kind").is_none() || there("promoted").is_none() {
            // Not written, but a batch of this stage's columns wants them.
            for turn in turns.iter_mut() {
                turn.sample_kind.get_or_insert(SampleKind::None);
                turn.promoted.get_or_insert(false);
            }
        }
        let built = turn::arrays(&writers, turns)
            .map_err(|source| table::Error::Schema { name: "redacted rows".to_owned(), source })?;
        for (field, array) in built {
            if let Some(place) = there(field.name()) {
                arrays[place] = array;
            }
        }
        Ok(())
    }

    fn foreign(&self, field: &Field, array: &ArrayRef, spots: &mut Vec<Spot>) -> ArrayRef {
        let mut redact = |row: usize, text: &str| -> String {
            match self.redactor.text(text) {
                None => text.to_owned(),
                Some(Redacted { text, counts }) => {
                    let column = field.name().clone();
                    spots.push(Spot { row, column, counts, unaligned: false });
                    text
                }
            }
        };
        match field.data_type() {
            DataType::Utf8 => strings::<i32>(array, &mut redact),
            DataType::LargeUtf8 => strings::<i64>(array, &mut redact),
            DataType::List(item) if *item.data_type() == DataType::Utf8 => {
                let lists = array.as_list::<i32>();
                let mut builder = ListBuilder::new(StringBuilder::new()).with_field(item.clone());
                for row in 0..lists.len() {
                    if lists.is_valid(row) {
                        let items = lists.value(row);
                        for text in items.as_string::<i32>() {
                            builder.values().append_option(text.map(|text| redact(row, text)));
                        }
                    }
                    builder.append(lists.is_valid(row));
                }
                Arc::new(builder.finish())
            }
            _ => array.clone(),
        }
    }
}

fn strings<O: OffsetSizeTrait>(
    array: &ArrayRef,
    redact: &mut impl FnMut(usize, &str) -> String,
) -> ArrayRef {
    let texts = array.as_string::<O>().iter().enumerate();
    let redacted = texts.map(|(row, text)| text.map(|text| redact(row, text)));
    Arc::new(redacted.collect::<GenericStringArray<O>>())
}

/// Tells whether a column of another program holds no text, or text that can be
/// replaced.
fn redactable(data_type: &DataType) -> bool {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 => true,
        DataType::List(item) if *item.data_type() == DataType::Utf8 => true,
        other => {
            !other.is_nested()
                && !other.is_string()
                && !other.is_binary()
                && !matches!(other, DataType::Dictionary(..))
                || numbers_only(other)
        }
    }
}

fn numbers_only(data_type: &DataType) -> bool {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) => numbers_only(item.data_type()),
        DataType::Struct(fields) => fields.iter().all(|field| numbers_only(field.data_type())),
        other => other.is_numeric() || matches!(other, DataType::Boolean | DataType::Timestamp(..)),
    }
}

/// Columns whose words the token ids repeat.
fn spells_ids(column: &str) -> bool {
    ["messages", "tools", "response", "hints"].contains(&column)
}

impl Words {
    fn turn(&mut self, redactor: &mut Redactor, turn: &mut Turn) -> bool {
        self.ids(redactor, turn);
        for (column, text) in [("messages", &mut turn.messages), ("response", &mut turn.response)] {
            self.change(column, text, |text| redactor.json(text));
        }
        for (column, text) in [("tools", &mut turn.tools), ("next_state", &mut turn.next_state)] {
            if let Some(text) = text {
                self.change(column, text, |text| redactor.json(text));
            }
        }
        let plain = [
            ("finish_reason", &mut turn.finish_reason),
            ("matched_stop", &mut turn.matched_stop),
            ("untrainable_reason", &mut turn.untrainable_reason),
            ("feedback_text", &mut turn.feedback_text),
            ("judge_error", &mut turn.judge_error),
            ("hint_error", &mut turn.hint_error),
            ("sample_reason", &mut turn.sample_reason),
            ("advantage_error", &mut turn.advantage_error),
        ];
        for (column, text) in plain {
            if let Some(text) = text {
                self.change(column, text, |text| redactor.text(text));
            }
        }
        let lists =
            [("judge_text", &mut turn.judge_text), ("teacher_error", &mut turn.teacher_error)];
        for (column, texts) in lists {
            for text in texts.iter_mut().flatten().flatten() {
                self.change(column, text, |text| redactor.text(text));
            }
        }
        for text in turn.hints.iter_mut().flatten() {
            self.change("hints", text, |text| redactor.text(text));
        }
        let unaligned = self.found.keys().any(|column| spells_ids(column));
        if unaligned {
            set_aside(turn);
        }
        unaligned
    }

    fn ids(&mut self, redactor: &mut Redactor, turn: &mut Turn) {
        let stated = [
            ("session_id", &mut turn.session_id),
            ("turn_id", &mut turn.turn_id),
            ("branch", &mut turn.branch),
            ("request_id", &mut turn.request_id),
            ("model", &mut turn.model),
        ];
        let optional = [
            ("parent_turn_id", &mut turn.parent_turn_id),
            ("client", &mut turn.client),
            ("weight_version", &mut turn.weight_version),
            ("weight_version_end", &mut turn.weight_version_end),
            ("teacher", &mut turn.teacher),
            ("student_version", &mut turn.student_version),
        ];
        let optional =
            optional.into_iter().filter_map(|(column, text)| Some((column, text.as_mut()?)));
        for (column, text) in stated.into_iter().chain(optional) {
            self.change(column, text, |text| redactor.id(text));
        }
    }

    fn change(
        &mut self,
        column: &str,
        text: &mut String,
        redact: impl FnOnce(&str) -> Option<Redacted>,
    ) {
        if let Some(redacted) = redact(text) {
            *text = redacted.text;
            let counts = self.found.entry(column.to_owned()).or_default();
            for (kind, count) in redacted.counts {
                *counts.entry(kind).or_default() += count;
            }
        }
    }
}

/// Takes the ids from a row, and all that is counted by them. What else it had to
/// say stays.
fn set_aside(turn: &mut Turn) {
    turn.prompt_ids = None;
    turn.response_ids = None;
    turn.rollout_log_probs = None;
    turn.token_source = TokenSource::None;
    turn.untrainable_reason = Some(REASON.to_owned());
    turn.ends_with_stop_token = None;
    turn.clear_taught_values();
    turn.loss_mask = None;
    turn.rl_advantages = None;
    turn.advantages = None;
    if turn.sample_kind.is_some() {
        turn.sample_kind = Some(SampleKind::None);
        turn.sample_reason = Some(REASON.to_owned());
        turn.promoted = Some(false);
    }
    // Two hints may have become one, or a longer one the shorter.
    if let Some(hints) = &mut turn.hints {
        hints.sort_by_key(|hint| hint.chars().count());
        let mut seen = std::collections::HashSet::new();
        hints.retain(|hint| seen.insert(hint.clone()));
    }
}

fn encode(error: arrow::error::ArrowError) -> Error {
    let name = "redacted rows".to_owned();
    table::Error::Encode { name, reason: error.to_string() }.into()
}
