//! Sizes in bytes, and cutting batches so that they stay bounded: one session of
//! long prompts must not make a batch that nobody can hold.

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::DataType;

/// The most that one batch should weigh. A single heavier row stays whole.
pub(super) const BATCH_BYTES: usize = 16 << 20;
/// The most rows that one batch should have.
pub(super) const BATCH_ROWS: usize = 8192;

/// Cuts a batch into pieces within the bounds.
pub(super) fn pieces(batch: &RecordBatch, limit: usize) -> Vec<RecordBatch> {
    let mut found = Vec::new();
    cut(batch, limit, 0, batch.num_rows(), &mut found);
    found
}

fn cut(batch: &RecordBatch, limit: usize, start: usize, rows: usize, out: &mut Vec<RecordBatch>) {
    if rows <= 1 || (rows <= BATCH_ROWS && weight(batch, start, rows) <= limit) {
        out.push(batch.slice(start, rows));
        return;
    }
    let half = rows / 2;
    cut(batch, limit, start, half, out);
    cut(batch, limit, start + half, rows - half, out);
}

/// Returns the bytes of some rows of a batch.
pub(super) fn weight(batch: &RecordBatch, start: usize, rows: usize) -> usize {
    batch.columns().iter().map(|column| bytes(column, start, rows)).sum()
}

fn bytes(array: &dyn Array, start: usize, rows: usize) -> usize {
    if rows == 0 {
        return 0;
    }
    let end = start + rows;
    let own = match array.data_type() {
        DataType::Utf8 => span(array.as_string::<i32>().value_offsets(), start, end) + 4 * rows,
        DataType::LargeUtf8 => {
            span(array.as_string::<i64>().value_offsets(), start, end) + 8 * rows
        }
        DataType::Binary => span(array.as_binary::<i32>().value_offsets(), start, end) + 4 * rows,
        DataType::LargeBinary => {
            span(array.as_binary::<i64>().value_offsets(), start, end) + 8 * rows
        }
        DataType::List(_) => {
            let list = array.as_list::<i32>();
            let (first, last) = (list.value_offsets()[start], list.value_offsets()[end]);
            bytes(list.values(), first as usize, (last - first) as usize) + 4 * rows
        }
        DataType::LargeList(_) => {
            let list = array.as_list::<i64>();
            let (first, last) = (list.value_offsets()[start], list.value_offsets()[end]);
            bytes(list.values(), first as usize, (last - first) as usize) + 8 * rows
        }
        DataType::Struct(_) => {
            array.as_struct().columns().iter().map(|column| bytes(column, start, rows)).sum()
        }
        DataType::Boolean => rows.div_ceil(8),
        DataType::Null => 0,
        other => match other.primitive_width() {
            Some(width) => width * rows,
            // Views, maps, unions: their share of the whole.
            None => array.get_array_memory_size() * rows / array.len().max(1),
        },
    };
    own + array.nulls().map_or(0, |_| rows.div_ceil(8))
}

fn span<T: Copy + TryInto<usize>>(offsets: &[T], start: usize, end: usize) -> usize {
    let at = |index: usize| offsets[index].try_into().unwrap_or_default();
    at(end).saturating_sub(at(start))
}
