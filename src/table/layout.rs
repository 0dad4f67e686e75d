//! How a table is laid out in Parquet. Measured: zstd 1 everywhere; for numbers
//! per token no dictionary and split bytes, which beats every other encoding in
//! size and speed; for texts no dictionary and large pages, so that what a long
//! session repeats compresses away. Small numbers per token (masks, votes) have no
//! dictionary either: each would be looked up in it, and zstd makes next to nothing of
//! what is one value over and over.

use arrow::datatypes::{DataType, Field, Schema};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{
    EnabledStatistics, WriterProperties, WriterPropertiesBuilder, WriterVersion,
};
use parquet::schema::types::ColumnPath;

use super::size::{BATCH_BYTES, BATCH_ROWS};

/// Columns whose rows repeat each other's long texts or prompts.
const REPETITIVE: &[&str] =
    &["messages", "tools", "response", "next_state", "prompt_ids", "judge_text"];

/// Returns the writer's settings for a schema.
pub(super) fn properties(schema: &Schema) -> WriterProperties {
    let mut builder = WriterProperties::builder()
        .set_writer_version(WriterVersion::PARQUET_1_0)
        .set_created_by(concat!("oclaw ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_max_row_group_row_count(Some(BATCH_ROWS))
        .set_key_value_metadata(Some(key_values(schema)));
    for field in schema.fields() {
        let repetitive = REPETITIVE.contains(&field.name().as_str());
        builder = column(builder, field, &mut Vec::new(), repetitive);
    }
    // The order of a folder's shards is that of their first rows' times.
    builder
        .set_column_statistics_enabled(ColumnPath::from("created_at"), EnabledStatistics::Chunk)
        .build()
}

/// The metadata again as plain Parquet entries, for readers that do not look
/// into the Arrow schema.
fn key_values(schema: &Schema) -> Vec<KeyValue> {
    let mut entries: Vec<_> = schema.metadata().iter().collect();
    entries.sort();
    entries.into_iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())).collect()
}

/// A leaf's path follows the Arrow field names: `x.list.item` below a list. A
/// wrong path would be ignored silently; a test reads the encodings back.
fn column(
    mut builder: WriterPropertiesBuilder,
    field: &Field,
    above: &mut Vec<String>,
    repetitive: bool,
) -> WriterPropertiesBuilder {
    above.push(field.name().clone());
    match field.data_type() {
        DataType::List(item) | DataType::LargeList(item) => {
            above.push("list".to_owned());
            builder = column(builder, item, above, repetitive);
            above.pop();
        }
        DataType::Struct(fields) => {
            for inner in fields {
                builder = column(builder, inner, above, repetitive);
            }
        }
        leaf => {
            let path = ColumnPath::new(above.clone());
            // Whoever only asks whether all prompts are sound need not read them.
            if above[0] == "prompt_ids" {
                builder =
                    builder.set_column_statistics_enabled(path.clone(), EnabledStatistics::Chunk);
            }
            let listed = above.len() > 1 && above.iter().any(|part| part == "list");
            let split = matches!(leaf, DataType::Float32 | DataType::Int32);
            if listed && (split || *leaf == DataType::Int8) {
                builder = builder.set_column_dictionary_enabled(path.clone(), false);
            }
            if listed && split {
                builder = builder.set_column_encoding(path.clone(), Encoding::BYTE_STREAM_SPLIT);
            }
            if repetitive {
                builder = builder
                    .set_column_dictionary_enabled(path.clone(), false)
                    .set_column_data_page_size_limit(path, BATCH_BYTES);
            }
        }
    }
    above.pop();
    builder
}
