//! The one struct column.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, Float32Array, Int32Array, Int64Array, StringArray, StructArray,
    UInt32Array,
};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Field, Fields, Float32Type, Int32Type, Int64Type, UInt32Type,
};

use super::Cell;
use crate::trajectory::turn::Sampling;
use crate::trajectory::words::{LogProbKind, Word};

impl Cell for Sampling {
    fn data_type() -> DataType {
        DataType::Struct(sampling_fields())
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
        let rows: Vec<_> = values.collect();
        let column = |pick: fn(&Sampling) -> Option<f32>| {
            let values: Float32Array = rows.iter().map(|row| row.and_then(pick)).collect();
            Arc::new(values) as ArrayRef
        };
        let top_k: Int32Array = rows.iter().map(|row| row.and_then(|row| row.top_k)).collect();
        let seed: Int64Array = rows.iter().map(|row| row.and_then(|row| row.seed)).collect();
        let max_tokens: UInt32Array =
            rows.iter().map(|row| row.and_then(|row| row.max_tokens)).collect();
        let kind: StringArray = rows
            .iter()
            .map(|row| Some(row.map_or(LogProbKind::Unknown, |row| row.log_prob_kind).as_str()))
            .collect();
        let nulls = NullBuffer::from_iter(rows.iter().map(Option::is_some));
        Arc::new(StructArray::new(
            sampling_fields(),
            vec![
                column(|row| row.temperature),
                column(|row| row.top_p),
                Arc::new(top_k),
                column(|row| row.min_p),
                Arc::new(seed),
                Arc::new(max_tokens),
                Arc::new(kind),
            ],
            Some(nulls),
        ))
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        let fields = array.as_struct();
        fn value<T: ArrowPrimitiveType>(array: &ArrayRef, row: usize) -> Option<T::Native> {
            let array = array.as_primitive::<T>();
            array.is_valid(row).then(|| array.value(row))
        }
        let kind = fields.column(6).as_string::<i32>().value(row);
        Ok(Self {
            temperature: value::<Float32Type>(fields.column(0), row),
            top_p: value::<Float32Type>(fields.column(1), row),
            top_k: value::<Int32Type>(fields.column(2), row),
            min_p: value::<Float32Type>(fields.column(3), row),
            seed: value::<Int64Type>(fields.column(4), row),
            max_tokens: value::<UInt32Type>(fields.column(5), row),
            log_prob_kind: LogProbKind::parse(kind).ok_or_else(|| kind.to_owned())?,
        })
    }

    fn vocabulary() -> String {
        "`raw`, `tempered`, `unknown`".to_owned()
    }
}

fn sampling_fields() -> Fields {
    Fields::from(vec![
        Field::new("temperature", DataType::Float32, true),
        Field::new("top_p", DataType::Float32, true),
        Field::new("top_k", DataType::Int32, true),
        Field::new("min_p", DataType::Float32, true),
        Field::new("seed", DataType::Int64, true),
        Field::new("max_tokens", DataType::UInt32, true),
        Field::new("log_prob_kind", DataType::Utf8, false),
    ])
}
