//! What a spliced file is: the input's columns exactly as they lie there, whatever the
//! types that the schema has for them, and the stage's own.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use parquet::arrow::ArrowSchemaConverter;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::schema::types::{SchemaDescriptor, Type, TypePtr};

/// The schema of the output, for readers of both kinds.
pub(in crate::table) struct Shape {
    pub(in crate::table) arrow: SchemaRef,
    pub(in crate::table) parquet: SchemaDescriptor,
    /// The stage's own columns, in the order of the output.
    pub(in crate::table) new: SchemaRef,
    /// For each leaf whether it is the stage's own.
    own: Vec<bool>,
}

impl Shape {
    /// Takes the columns of a layout from an input, except its `own`. Returns nothing
    /// if one is not there, or none of Parquet's.
    pub(super) fn of(
        input: &ArrowReaderMetadata,
        layout: &SchemaRef,
        own: &[&str],
    ) -> Option<Self> {
        let is_own = |field: &FieldRef| own.contains(&field.name().as_str());
        let new: Vec<FieldRef> = layout.fields().iter().filter(|it| is_own(it)).cloned().collect();
        let own_columns = Arc::new(Schema::new(new));
        let new = ArrowSchemaConverter::new().convert(&own_columns).ok()?;
        let (mut fields, mut roots) = (Vec::new(), Vec::new());
        for field in layout.fields() {
            let (field, parquet) = match is_own(field) {
                true => (field, &new),
                false => (input.schema().fields().find(field.name())?.1, input.parquet_schema()),
            };
            roots.push(root_type(parquet, field.name())?.clone());
            fields.push(field.clone());
        }
        let group = Type::group_type_builder("arrow_schema").with_fields(roots).build().ok()?;
        let parquet = SchemaDescriptor::new(Arc::new(group));
        let arrow = Arc::new(Schema::new_with_metadata(fields, layout.metadata().clone()));
        let own = (0..parquet.num_columns()).map(|leaf| own.contains(&root(&parquet, leaf)));
        Some(Self { own: own.collect(), new: own_columns, arrow, parquet })
    }

    /// Finds the leaves of an input that the output's are copied from, if it has all.
    pub(super) fn origins(&self, input: &SchemaDescriptor) -> Option<Vec<Option<usize>>> {
        let mut places = BTreeMap::new();
        for leaf in 0..input.num_columns() {
            places.insert(input.column(leaf).path().parts().to_vec(), leaf);
        }
        let origin = |(leaf, own): (usize, &bool)| {
            if *own {
                return Some(None);
            }
            let wanted = self.parquet.column(leaf);
            let name = root(&self.parquet, leaf);
            let place = *places.get(wanted.path().parts())?;
            let alike = root_type(input, name)? == root_type(&self.parquet, name)?;
            (alike && input.column(place) == wanted).then_some(Some(place))
        };
        self.own.iter().enumerate().map(origin).collect()
    }
}

/// Returns the name of the column that a leaf belongs to.
pub(super) fn root(schema: &SchemaDescriptor, leaf: usize) -> &str {
    schema.get_column_root(leaf).name()
}

fn root_type<'a>(schema: &'a SchemaDescriptor, name: &str) -> Option<&'a TypePtr> {
    schema.root_schema().get_fields().iter().find(|field| field.name() == name)
}
