//! How the fragments of a stream grow into a message.

use serde_json::Value;

/// Joins a fragment of a tool call into the call: arguments and names grow,
/// everything else is said once.
pub(super) fn merge(known: &mut Value, fragment: &Value) {
    let (Some(known), Some(fragment)) = (known.as_object_mut(), fragment.as_object()) else {
        return;
    };
    for (name, value) in fragment {
        match (name.as_str(), known.get_mut(name), value) {
            (_, _, Value::Null) => {}
            ("function", Some(inner), value) => merge(inner, value),
            ("arguments", Some(inner), value) => append(inner, value),
            ("name", Some(Value::String(inner)), Value::String(more)) if inner != more => {
                inner.push_str(more);
            }
            ("id" | "type", Some(Value::String(inner)), Value::String(more)) => {
                if inner.is_empty() {
                    inner.clone_from(more);
                }
            }
            (_, Some(_), _) => {}
            (_, None, value) => {
                known.insert(name.clone(), value.clone());
            }
        }
    }
}

/// Appends text to text and items to items; anything else is replaced.
pub(super) fn append(known: &mut Value, value: &Value) {
    match (known, value) {
        (Value::String(known), Value::String(more)) => known.push_str(more),
        (Value::Array(known), Value::Array(more)) => known.extend(more.iter().cloned()),
        (known, value) => *known = value.clone(),
    }
}
