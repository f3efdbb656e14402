//! The contract as a page of Markdown: every action with its parameters, result and an example, then every model.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::example::{example, resolve, type_of};
use super::openapi::models_of;
use super::{ALL_SCHEMAS, Describe, Described as _, Hello, SchemaGenerator, contract};

/// The beginning of the page.
const HEAD: &str = "\
# Actions and models

Every action that a client can call, and every model in its parameters and results. `cargo xtask schema` generates this page
from [schema/contract.json](schema/contract.json); [wire.md](wire.md) describes the messages, streams, tokens and errors. An
example is the body of a `curl` call: `curl \"$BOX_URL/rpc\" -H \"Authorization: Bearer $BOX_TOKEN\" -d '…'`. A server also
returns the contract as an OpenAPI document, at `/openapi.json`.

## Actions
";

/// Returns the page.
pub fn page() -> String {
    let contract = contract();
    let mut page = HEAD.to_owned();
    let mut generator = SchemaGenerator::default();
    let actions = [Hello::describe as Describe];
    for describe in actions.iter().chain(ALL_SCHEMAS) {
        let name = describe(&mut generator).name;
        action(&mut page, &contract, name);
    }
    page.push_str("\n## Models\n");
    for name in models_of(&contract) {
        model(&mut page, &contract, &name);
    }
    page
}

/// Writes a line. A write to a string cannot fail.
macro_rules! line {
    ($page:expr, $($text:tt)*) => {{ let _ = writeln!($page, $($text)*); }};
}

fn action(page: &mut String, contract: &Value, name: &str) {
    let action = &contract["actions"][name];
    line!(page, "\n### {name}\n\n{}\n", text(&action["description"]));
    let params = resolve(contract, &action["params"]);
    table(page, "parameter", params);
    let result = expression(&action["result"]);
    match action.get("chunk") {
        Some(chunk) => line!(page, "Result: {result}; chunks: {}", expression(chunk)),
        None => line!(page, "Result: {result}"),
    }
    let params = example(contract, &action["params"]);
    let call = match &params {
        Value::Object(members) if members.is_empty() => json!({"method": name}),
        _ => json!({"method": name, "params": params}),
    };
    line!(page, "\n```json\n{call}\n```");
}

fn model(page: &mut String, contract: &Value, name: &str) {
    let schema = &contract["$defs"][name];
    line!(page, "\n### {name}\n");
    if schema["description"].is_string() {
        line!(page, "{}\n", text(&schema["description"]));
    }
    if schema["properties"].is_object() {
        table(page, "member", schema);
    }
    if let Some(choices) = choices(schema) {
        for choice in choices {
            let about = text(&choice["description"]);
            let about = Some(about).filter(|about| !about.is_empty());
            let about = about.map_or(String::new(), |about| format!(": {about}"));
            line!(page, "- {}{about}", expression(choice));
        }
    } else if !schema["properties"].is_object() {
        line!(page, "{}", expression(schema));
    }
}

/// Writes the members of an object, if it has any.
fn table(page: &mut String, what: &str, schema: &Value) {
    let Some(members) = schema["properties"].as_object() else {
        return;
    };
    line!(
        page,
        "| {what} | type | default | meaning |\n|---|---|---|---|"
    );
    let required: Vec<_> = schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .collect();
    for (name, member) in members {
        let default = match member.get("default") {
            _ if required.iter().any(|required| *required == name) => "required".to_owned(),
            Some(Value::Null) | None => String::new(),
            Some(default) => format!("`{default}`"),
        };
        let about = text(&member["description"]);
        let kind = expression(member);
        line!(page, "| `{name}` | {kind} | {default} | {about} |");
    }
    page.push('\n');
}

/// Returns the alternatives of a schema.
fn choices(schema: &Value) -> Option<&Vec<Value>> {
    ["oneOf", "anyOf"]
        .into_iter()
        .find_map(|key| schema[key].as_array())
}

/// Returns the type of a value in words, with links to models.
fn expression(schema: &Value) -> String {
    if let Some(name) = model_name(schema) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(value) = schema.get("const") {
        return format!("`{value}`");
    }
    if let Some(values) = schema["enum"].as_array() {
        let values = values.iter().filter(|value| !value.is_null());
        let values: Vec<_> = values.map(|value| format!("`{value}`")).collect();
        return values.join(", ");
    }
    if let Some(choices) = choices(schema) {
        let choices = choices.iter().filter(|choice| choice["type"] != "null");
        let choices: Vec<_> = choices.map(expression).collect();
        return choices.join(" or ");
    }
    match type_of(schema) {
        "array" if schema["items"].is_object() => {
            format!("list of {}", expression(&schema["items"]))
        }
        "array" => "list".to_owned(),
        "object" => object(schema),
        "" => "any".to_owned(),
        name => name.to_owned(),
    }
}

/// Returns the type of an object in words.
fn object(schema: &Value) -> String {
    if let Some(members) = schema["properties"].as_object() {
        let members = members.iter().map(|(name, member)| {
            let kind = expression(member);
            format!("`{name}`: {kind}")
        });
        let members: Vec<_> = members.collect();
        return format!("{{{}}}", members.join(", "));
    }
    match &schema["additionalProperties"] {
        values if values.is_object() => format!("map of {}", expression(values)),
        _ => "object".to_owned(),
    }
}

/// Returns the name of the model that a schema refers to.
fn model_name(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.strip_prefix("#/$defs/")
}

/// Returns a description for a cell of a table.
fn text(description: &Value) -> String {
    let text = description.as_str().unwrap_or_default();
    text.replace('|', "\\|").replace('<', "&lt;")
}
