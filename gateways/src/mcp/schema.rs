//! The schemas of arguments and results, as plain as models and strict validators need them.

use std::sync::Arc;

use rmcp::model::JsonObject;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

/// Returns the schema of a type.
pub(super) fn schema_of<T: JsonSchema>() -> Arc<JsonObject> {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let mut schema = schema.to_value();
    simplify(&mut schema);
    let Value::Object(mut schema) = schema else {
        return Arc::default();
    };
    schema.remove("description");
    Arc::new(schema)
}

/// Returns the schema of the data of an answer, which may have notes.
pub(super) fn answer_schema_of<T: JsonSchema>() -> Arc<JsonObject> {
    let mut schema = schema_of::<T>();
    if let Some(Value::Object(members)) = Arc::make_mut(&mut schema).get_mut("properties") {
        let notes = json!({
            "type": "array",
            "items": {"type": "string"},
            "description": "What the policy changed, and whether the default box is a new one."
        });
        members.insert("notes".to_owned(), notes);
    }
    schema
}

/// Removes what says nothing to a client: names of Rust types, formats of numbers, and `null` for absent members.
fn simplify(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(simplify),
        Value::Object(members) => {
            for name in ["title", "format"] {
                if members.get(name).is_some_and(Value::is_string) {
                    members.remove(name);
                }
            }
            if members.get("default").is_some_and(Value::is_null) {
                members.remove("default");
            }
            if let Some(Value::Array(types)) = members.get_mut("type") {
                types.retain(|kind| kind != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    members.insert("type".into(), only);
                }
            }
            if let Some(Value::Array(choices)) = members.get_mut("anyOf") {
                choices.retain(|choice| choice["type"] != "null");
                if let [Value::Object(only)] = choices.as_slice() {
                    let only = only.clone();
                    members.remove("anyOf");
                    for (name, value) in only {
                        // The description of the member is the more specific one.
                        members.entry(name).or_insert(value);
                    }
                }
            }
            if let Some(Value::Array(values)) = members.get_mut("enum") {
                values.retain(|value| !value.is_null());
            }
            members.values_mut().for_each(simplify);
        }
        _ => {}
    }
}
