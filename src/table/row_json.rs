//! A row as JSON, for people and for tools that know no Arrow. Works for columns
//! that the schema does not know, too.

use arrow::array::{Array, ArrowPrimitiveType, AsArray, RecordBatch};
use arrow::datatypes::{
    DataType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    TimeUnit, TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType,
    TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow::util::display::array_value_to_string;
use serde_json::{Map, Value};

/// Returns one row as an object: every column, in order, nulls included.
pub fn row(batch: &RecordBatch, row: usize) -> Map<String, Value> {
    let schema = batch.schema();
    let names = schema.fields().iter().map(|field| field.name().clone());
    names.zip(batch.columns().iter().map(|column| value(column, row))).collect()
}

/// Returns one value as JSON. A number that JSON cannot hold becomes the string
/// `NaN`, `inf` or `-inf`; an instant becomes RFC 3339 text.
pub fn value(array: &dyn Array, row: usize) -> Value {
    if array.is_null(row) {
        return Value::Null;
    }
    match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => array.as_boolean().value(row).into(),
        DataType::Int8 => native::<Int8Type>(array, row).into(),
        DataType::Int16 => native::<Int16Type>(array, row).into(),
        DataType::Int32 => native::<Int32Type>(array, row).into(),
        DataType::Int64 => native::<Int64Type>(array, row).into(),
        DataType::UInt8 => native::<UInt8Type>(array, row).into(),
        DataType::UInt16 => native::<UInt16Type>(array, row).into(),
        DataType::UInt32 => native::<UInt32Type>(array, row).into(),
        DataType::UInt64 => native::<UInt64Type>(array, row).into(),
        DataType::Float16 => float(native::<Float16Type>(array, row)),
        DataType::Float32 => float(native::<Float32Type>(array, row)),
        DataType::Float64 => float(native::<Float64Type>(array, row)),
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Utf8View => array.as_string_view().value(row).into(),
        DataType::Timestamp(unit, _) => {
            let micros = match unit {
                TimeUnit::Second => {
                    native::<TimestampSecondType>(array, row).saturating_mul(1_000_000)
                }
                TimeUnit::Millisecond => {
                    native::<TimestampMillisecondType>(array, row).saturating_mul(1000)
                }
                TimeUnit::Microsecond => native::<TimestampMicrosecondType>(array, row),
                TimeUnit::Nanosecond => {
                    native::<TimestampNanosecondType>(array, row).div_euclid(1000)
                }
            };
            instant(micros).into()
        }
        DataType::List(_) => items(&array.as_list::<i32>().value(row)),
        DataType::LargeList(_) => items(&array.as_list::<i64>().value(row)),
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            let names = fields.iter().map(|field| field.name().clone());
            names.zip(columns.iter().map(|column| value(column, row))).collect()
        }
        _ => array_value_to_string(array, row).map_or(Value::Null, Value::String),
    }
}

fn items(list: &dyn Array) -> Value {
    (0..list.len()).map(|index| value(list, index)).collect()
}

fn native<T: ArrowPrimitiveType>(array: &dyn Array, row: usize) -> T::Native {
    array.as_primitive::<T>().value(row)
}

/// The shortest decimal that reads back as the same number of its own width:
/// 0.1 of an `f32` is `0.1`, not `0.10000000149011612`.
fn float(number: impl std::fmt::Display) -> Value {
    let text = number.to_string();
    match text.parse::<f64>().ok().and_then(serde_json::Number::from_f64) {
        Some(number) => Value::Number(number),
        None => Value::String(text),
    }
}

/// Writes an instant in UTC, microseconds since 1970, as RFC 3339.
pub fn instant(micros: i64) -> String {
    let (seconds, micros) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days to a date of the proleptic Gregorian calendar, in eras of 400 years
    // that begin on the first of March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

#[cfg(test)]
mod tests {
    use super::{float, instant};

    #[test]
    fn instants() {
        assert_eq!(instant(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(instant(-1), "1969-12-31T23:59:59.999999Z");
        assert_eq!(instant(951_782_400_000_000), "2000-02-29T00:00:00.000000Z");
        assert_eq!(instant(1_764_423_296_000_123), "2025-11-29T13:34:56.000123Z");
    }

    #[test]
    fn floats_print_short() {
        assert_eq!(float(0.1_f32).to_string(), "0.1");
        assert_eq!(float(-1.0_f32).to_string(), "-1.0");
        assert_eq!(float(f32::NAN).to_string(), "\"NaN\"");
        assert_eq!(float(f32::NEG_INFINITY).to_string(), "\"-inf\"");
    }
}
