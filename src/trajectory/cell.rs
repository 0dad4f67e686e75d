//! How one value of a row is read from and written to an Arrow array. The only
//! place that downcasts arrays.

mod sampling;

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanBuilder, ListArray, ListBuilder, PrimitiveBuilder,
    StringBuilder,
};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Field, Float32Type, Int8Type, Int32Type, TimeUnit,
    TimestampMicrosecondType, UInt8Type, UInt16Type, UInt32Type,
};

use super::words::{
    NextStateKind, RewardSource, SampleKind, SessionSource, Status, TokenSource,
    WeightVersionSource, Word,
};

/// A value that an Arrow array can hold.
pub(super) trait Cell: Sized {
    /// Whether the type itself has a "not known".
    const NULLABLE: bool = false;

    /// Returns the Arrow type of the column.
    fn data_type() -> DataType;

    /// Builds an array from one value per row. `None` is null.
    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef
    where
        Self: 'a;

    /// Reads a value that is known not to be null. The array has this cell's
    /// type. Errors with the text found if it is no word of a closed set.
    fn read(array: &dyn Array, row: usize) -> Result<Self, String>;

    /// Returns the value that stands for null, if the type has one.
    fn null() -> Option<Self> {
        None
    }

    /// Returns the words allowed, for messages.
    fn vocabulary() -> String {
        String::new()
    }
}

impl<T: Cell> Cell for Option<T> {
    const NULLABLE: bool = true;

    fn data_type() -> DataType {
        T::data_type()
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef
    where
        Self: 'a,
    {
        T::build(values.map(|value| value.and_then(Option::as_ref)))
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        T::read(array, row).map(Some)
    }

    fn null() -> Option<Self> {
        Some(None)
    }

    fn vocabulary() -> String {
        T::vocabulary()
    }
}

/// A microsecond instant in UTC, counted from 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Micros(pub i64);

/// An element of a list column.
pub(super) trait Primitive: Copy {
    type Arrow: ArrowPrimitiveType<Native = Self>;
}

macro_rules! primitive {
    ($($rust:ty = $arrow:ty),*) => {$(
        impl Primitive for $rust {
            type Arrow = $arrow;
        }

        impl Cell for $rust {
            fn data_type() -> DataType {
                <$arrow>::DATA_TYPE
            }

            fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
                let mut builder = PrimitiveBuilder::<$arrow>::new();
                values.for_each(|value| builder.append_option(value.copied()));
                Arc::new(builder.finish())
            }

            fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
                Ok(array.as_primitive::<$arrow>().value(row))
            }
        }
    )*};
}

primitive!(
    u8 = UInt8Type,
    u16 = UInt16Type,
    u32 = UInt32Type,
    f32 = Float32Type,
    i32 = Int32Type,
    i8 = Int8Type
);

impl Cell for Micros {
    fn data_type() -> DataType {
        DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
        let mut builder = PrimitiveBuilder::<TimestampMicrosecondType>::new().with_timezone("UTC");
        values.for_each(|value| builder.append_option(value.map(|instant| instant.0)));
        Arc::new(builder.finish())
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        Ok(Micros(array.as_primitive::<TimestampMicrosecondType>().value(row)))
    }
}

impl Cell for bool {
    fn data_type() -> DataType {
        DataType::Boolean
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
        let mut builder = BooleanBuilder::new();
        values.for_each(|value| builder.append_option(value.copied()));
        Arc::new(builder.finish())
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        Ok(array.as_boolean().value(row))
    }
}

impl Cell for String {
    fn data_type() -> DataType {
        DataType::Utf8
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
        let mut builder = StringBuilder::new();
        values.for_each(|value| builder.append_option(value));
        Arc::new(builder.finish())
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        Ok(array.as_string::<i32>().value(row).to_owned())
    }
}

macro_rules! word {
    ($($word:ty),*) => {$(
        impl Cell for $word {
            fn data_type() -> DataType {
                DataType::Utf8
            }

            fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
                let mut builder = StringBuilder::new();
                values.for_each(|value| builder.append_option(value.map(|word| word.as_str())));
                Arc::new(builder.finish())
            }

            fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
                let text = array.as_string::<i32>().value(row);
                <$word>::parse(text).ok_or_else(|| text.to_owned())
            }

            fn vocabulary() -> String {
                let words: Vec<_> =
                    <$word>::ALL.iter().map(|word| format!("`{word}`")).collect();
                words.join(", ")
            }
        }
    )*};
}

word!(
    SessionSource,
    WeightVersionSource,
    Status,
    TokenSource,
    NextStateKind,
    SampleKind,
    RewardSource
);

fn list_of(item: DataType, nullable: bool) -> DataType {
    DataType::List(Arc::new(Field::new("item", item, nullable)))
}

/// Returns where the items of a row are among all items of the column. To slice an array
/// of them out for each row would cost more than to copy them.
fn span(lists: &ListArray, row: usize) -> Range<usize> {
    let offsets = lists.value_offsets();
    offsets[row] as usize..offsets[row + 1] as usize
}

macro_rules! list {
    ($($item:ty, $arrow:ty);*) => {$(
        impl Cell for Vec<$item> {
            fn data_type() -> DataType {
                list_of(<$arrow>::DATA_TYPE, false)
            }

            fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
                let field = Field::new("item", <$arrow>::DATA_TYPE, false);
                let mut builder =
                    ListBuilder::new(PrimitiveBuilder::<$arrow>::new()).with_field(field);
                values.for_each(|value| {
                    if let Some(items) = value {
                        builder.values().append_slice(items);
                    }
                    builder.append(value.is_some());
                });
                Arc::new(builder.finish())
            }

            fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
                let lists = array.as_list::<i32>();
                let items = lists.values().as_primitive::<$arrow>();
                Ok(items.values()[span(lists, row)].to_vec())
            }
        }

        impl Cell for Vec<Option<$item>> {
            fn data_type() -> DataType {
                list_of(<$arrow>::DATA_TYPE, true)
            }

            fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
                let mut builder = ListBuilder::new(PrimitiveBuilder::<$arrow>::new());
                values.for_each(|value| {
                    for item in value.into_iter().flatten() {
                        builder.values().append_option(*item);
                    }
                    builder.append(value.is_some());
                });
                Arc::new(builder.finish())
            }

            fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
                let lists = array.as_list::<i32>();
                let (items, span) = (lists.values().as_primitive::<$arrow>(), span(lists, row));
                Ok(match items.nulls().filter(|nulls| nulls.null_count() > 0) {
                    None => items.values()[span].iter().copied().map(Some).collect(),
                    Some(nulls) => span
                        .map(|item| nulls.is_valid(item).then(|| items.value(item)))
                        .collect(),
                })
            }
        }
    )*};
}

list!(i8, Int8Type; i32, Int32Type; f32, Float32Type);

impl Cell for Vec<String> {
    fn data_type() -> DataType {
        list_of(DataType::Utf8, false)
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
        let field = Field::new("item", DataType::Utf8, false);
        let mut builder = ListBuilder::new(StringBuilder::new()).with_field(field);
        values.for_each(|value| {
            for item in value.into_iter().flatten() {
                builder.values().append_value(item);
            }
            builder.append(value.is_some());
        });
        Arc::new(builder.finish())
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        let items = array.as_list::<i32>().value(row);
        Ok(items
            .as_string::<i32>()
            .iter()
            .map(|item| item.unwrap_or_default().to_owned())
            .collect())
    }
}

impl Cell for Vec<Option<String>> {
    fn data_type() -> DataType {
        list_of(DataType::Utf8, true)
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef {
        let mut builder = ListBuilder::new(StringBuilder::new());
        values.for_each(|value| {
            for item in value.into_iter().flatten() {
                builder.values().append_option(item.as_ref());
            }
            builder.append(value.is_some());
        });
        Arc::new(builder.finish())
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        let items = array.as_list::<i32>().value(row);
        Ok(items.as_string::<i32>().iter().map(|item| item.map(str::to_owned)).collect())
    }
}

/// Candidates: the outer list follows `hints`, a null inner list is a candidate that failed.
impl<T: Primitive> Cell for Vec<Option<Vec<T>>>
where
    Vec<T>: Cell,
{
    fn data_type() -> DataType {
        list_of(list_of(T::Arrow::DATA_TYPE, false), true)
    }

    fn build<'a>(values: impl Iterator<Item = Option<&'a Self>>) -> ArrayRef
    where
        Self: 'a,
    {
        let item = Field::new("item", T::Arrow::DATA_TYPE, false);
        let inner = ListBuilder::new(PrimitiveBuilder::<T::Arrow>::new()).with_field(item);
        let mut builder = ListBuilder::new(inner);
        values.for_each(|value| {
            for candidate in value.into_iter().flatten() {
                if let Some(items) = candidate {
                    builder.values().values().append_slice(items);
                }
                builder.values().append(candidate.is_some());
            }
            builder.append(value.is_some());
        });
        Arc::new(builder.finish())
    }

    fn read(array: &dyn Array, row: usize) -> Result<Self, String> {
        let lists = array.as_list::<i32>();
        let candidates = lists.values();
        span(lists, row)
            .map(|index| match candidates.is_null(index) {
                true => Ok(None),
                false => <Vec<T> as Cell>::read(candidates, index).map(Some),
            })
            .collect()
    }
}
