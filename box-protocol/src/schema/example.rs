//! Example parameters of an action, generated from its schema: the required members with plausible values.

use serde_json::{Map, Value, json};

/// The depth at which nested models end.
const MAX_DEPTH: usize = 16;

/// Returns an example value of a schema.
pub(super) fn example(contract: &Value, schema: &Value) -> Value {
    value_of(contract, schema, "", 0)
}

/// Returns a value that says something to a reader, by the name of a member.
fn known(name: &str) -> Option<Value> {
    Some(match name {
        "box_id" => json!("work"),
        "spec" => json!({"box_id": "work"}),
        "program" => json!({"text": "echo hello"}),
        "command_id" => json!("build"),
        "shell_id" => json!("main"),
        "conn_id" => json!("web"),
        "upload_id" => json!("upload"),
        "path" | "from" => json!("/workspace/notes.txt"),
        "to" => json!("/workspace/old.txt"),
        "pattern" => json!("*.txt"),
        "port" => json!(8000),
        "image" | "reference" => json!("python:3.12"),
        "registry" => json!("registry.example"),
        "username" => json!("ann"),
        "password" => json!("secret"),
        "data" => json!("aGVsbG8K"),
        "size" => json!({"rows": 24, "cols": 80}),
        "name" | "template" | "id" => json!("base"),
        "kind" => json!("volume"),
        "text" => json!("echo hello"),
        "old" => json!("one"),
        "new" => json!("two"),
        _ => return None,
    })
}

/// Returns a value of a schema; `name` is that of its member.
fn value_of(contract: &Value, schema: &Value, name: &str, depth: usize) -> Value {
    let resolved = resolve(contract, schema);
    if let Some(value) = known(name).filter(|value| has_type(resolved, value)) {
        return value;
    }
    if depth > MAX_DEPTH {
        return Value::Null;
    }
    for key in ["const", "default"] {
        if let Some(value) = resolved.get(key) {
            return value.clone();
        }
    }
    let list = |key: &str| resolved.get(key).and_then(Value::as_array);
    if let Some(first) = list("enum").and_then(|values| values.first()) {
        return first.clone();
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if let Some(first) = list(key).and_then(|choices| choices.first()) {
            return value_of(contract, first, name, depth + 1);
        }
    }
    match type_of(resolved) {
        "object" => {
            let mut members = Map::new();
            for name in list("required").into_iter().flatten() {
                let name = name.as_str().unwrap_or_default();
                let member = &resolved["properties"][name];
                members.insert(name.into(), value_of(contract, member, name, depth + 1));
            }
            Value::Object(members)
        }
        "array" if resolved["minItems"].as_u64().unwrap_or(0) > 0 => {
            let item = resolved["prefixItems"].get(0);
            let item = item.unwrap_or(&resolved["items"]);
            json!([value_of(contract, item, name, depth + 1)])
        }
        "array" => json!([]),
        "integer" | "number" => json!(resolved["minimum"].as_u64().unwrap_or(1).max(1)),
        "boolean" => json!(true),
        "string" => json!("text"),
        _ => Value::Null,
    }
}

/// Follows the reference of a schema.
pub(super) fn resolve<'a>(contract: &'a Value, schema: &'a Value) -> &'a Value {
    let target = schema["$ref"].as_str();
    let target = target.and_then(|target| target.strip_prefix('#'));
    let target = target.and_then(|target| contract.pointer(target));
    target.unwrap_or(schema)
}

/// Returns the type of a schema without `null`; empty if it names none.
pub(super) fn type_of(schema: &Value) -> &str {
    match &schema["type"] {
        Value::String(name) => name,
        Value::Array(names) => {
            let mut names = names.iter().filter_map(Value::as_str);
            names.find(|name| *name != "null").unwrap_or_default()
        }
        _ => "",
    }
}

/// Returns whether a value may be of the type that a schema names.
fn has_type(schema: &Value, value: &Value) -> bool {
    match type_of(schema) {
        "" => value.is_object() && schema.get("oneOf").is_some(),
        "string" => {
            let is_free = schema.get("enum").is_none() && schema.get("const").is_none();
            value.is_string() && is_free
        }
        "integer" | "number" => value.is_number(),
        "object" => value.is_object(),
        _ => false,
    }
}
