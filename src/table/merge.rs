//! One schema for inputs that were written by different versions or by other
//! programs: the schema's own columns get the schema's types, columns it does
//! not know are kept, and a column that one input lacks is null there.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};

use super::Error;
use super::parquet_file::guarded;
use crate::trajectory;
use crate::trajectory::Column;

/// Returns the column of the schema by its name.
fn known(name: &str) -> Option<&'static Column> {
    trajectory::columns().iter().find(|column| column.name == name)
}

/// Puts the schemas of all inputs together, in the order of the first mention.
pub(super) fn schemas(inputs: &[(String, SchemaRef)]) -> Result<SchemaRef, Error> {
    let mut fields: Vec<Field> = Vec::new();
    for (name, schema) in inputs {
        check_names(name, schema)?;
        for found in schema.fields() {
            let found = conformed(name, found)?;
            match fields.iter_mut().find(|field| field.name() == found.name()) {
                None => fields.push(found),
                Some(field) => join(name, field, &found)?,
            }
        }
    }
    for field in &mut fields {
        let everywhere = inputs.iter().all(|(_, schema)| schema.index_of(field.name()).is_ok());
        if !everywhere {
            field.set_nullable(true);
        }
    }
    let metadata = inputs.first().map(|(_, schema)| schema.metadata().clone()).unwrap_or_default();
    Ok(Arc::new(Schema::new_with_metadata(fields, metadata)))
}

fn check_names(name: &str, schema: &Schema) -> Result<(), Error> {
    let fields = schema.fields();
    for (index, field) in fields.iter().enumerate() {
        if fields[..index].iter().any(|before| before.name() == field.name()) {
            let reason = format!("two columns are named `{}`", field.name());
            return Err(Error::Damaged { name: name.to_owned(), reason });
        }
    }
    for column in trajectory::columns() {
        let required = !column.nullable && column.writer == trajectory::Writer::Serve;
        if required && schema.index_of(column.name).is_err() {
            let source = trajectory::Error::MissingColumn { column: column.name };
            return Err(Error::Schema { name: name.to_owned(), source });
        }
    }
    Ok(())
}

/// Returns the field as it will leave the door.
fn conformed(name: &str, found: &FieldRef) -> Result<Field, Error> {
    let Some(column) = known(found.name()) else {
        return Ok(found.as_ref().clone());
    };
    trajectory::turn::check_type(column, found.data_type())
        .map_err(|source| Error::Schema { name: name.to_owned(), source })?;
    Ok(column.field().with_nullable(column.nullable || found.is_nullable()))
}

fn join(name: &str, field: &mut Field, found: &Field) -> Result<(), Error> {
    field.set_nullable(field.is_nullable() || found.is_nullable());
    if field.data_type() == found.data_type() {
        return Ok(());
    }
    let wanted = field.data_type().clone();
    if let Some(wider) = wider(&wanted, found.data_type()) {
        field.set_data_type(wider);
        return Ok(());
    }
    field.try_merge(found).map_err(|_| Error::Clash {
        name: name.to_owned(),
        column: field.name().clone(),
        found: found.data_type().to_string(),
        wanted: wanted.to_string(),
    })
}

/// Returns the type that holds the values of both without loss, for the plain
/// differences between writers.
fn wider(one: &DataType, other: &DataType) -> Option<DataType> {
    let all = |test: fn(&DataType) -> bool| test(one) && test(other);
    if all(DataType::is_signed_integer) {
        return Some(DataType::Int64);
    }
    if all(DataType::is_unsigned_integer) {
        return Some(DataType::UInt64);
    }
    if all(DataType::is_floating) {
        return Some(DataType::Float64);
    }
    all(DataType::is_string).then_some(DataType::LargeUtf8)
}

/// Brings a batch of one input to the common schema.
pub(super) fn align(
    name: &str,
    batch: &RecordBatch,
    schema: &SchemaRef,
) -> Result<RecordBatch, Error> {
    let damaged = |reason: String| Error::Damaged { name: name.to_owned(), reason };
    let columns: Result<Vec<ArrayRef>, Error> = schema
        .fields()
        .iter()
        .map(|field| {
            let Some(array) = batch.column_by_name(field.name()) else {
                return Ok(new_null_array(field.data_type(), batch.num_rows()));
            };
            if array.data_type() == field.data_type() {
                return Ok(array.clone());
            }
            match known(field.name()) {
                Some(column) => trajectory::turn::conform(array, column)
                    .map_err(|source| Error::Schema { name: name.to_owned(), source }),
                None => {
                    let options = CastOptions { safe: false, ..CastOptions::default() };
                    cast_with_options(array, field.data_type(), &options)
                        .map_err(|error| damaged(format!("column `{}`: {error}", field.name())))
                }
            }
        })
        .collect();
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    guarded(name, || {
        RecordBatch::try_new_with_options(schema.clone(), columns?, &options)
            .map_err(|error| damaged(error.to_string()))
    })
}
