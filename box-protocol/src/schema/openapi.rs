//! The contract as an OpenAPI document: one path, `POST /rpc`, whose body is the call of one action.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::example::example;
use super::{clean_descriptions, contract};

/// The action that has no meaning in a call of its own.
const HELLO: &str = "hello";

/// Returns the document, in a stable order.
///
/// The schemas of an action `NAME` are `NAME` for its request and `NAME.response`. All models have the names of the
/// contract.
pub fn openapi() -> Value {
    let contract = contract();
    let mut schemas = Map::new();
    let (mut calls, mut responses) = (Vec::new(), Vec::new());
    let (mut by_method, mut examples) = (Map::new(), Map::new());
    for (name, action) in contract["actions"].as_object().into_iter().flatten() {
        if name == HELLO {
            continue;
        }
        let request = reference(name);
        calls.push(json!({"$ref": request}));
        by_method.insert(name.clone(), request.into());
        responses.push(json!({"$ref": reference(&format!("{name}.response"))}));
        let params = example(&contract, &action["params"]);
        let call = json!({"method": name, "params": params});
        examples.insert(name.clone(), json!({"value": call}));
        schemas.insert(name.clone(), request_of(name, action, &contract));
        schemas.insert(format!("{name}.response"), response_of(action));
    }
    responses.push(json!({"$ref": reference("Error")}));
    schemas.insert("Error".into(), error());
    schemas.insert("Refusal".into(), refusal());
    for name in models_of(&contract) {
        schemas.insert(name.clone(), contract["$defs"][&name].clone());
    }
    for schema in schemas.values_mut() {
        turn_references(schema, &mut Vec::new());
    }
    let calls =
        json!({"oneOf": calls, "discriminator": {"propertyName": "method", "mapping": by_method}});
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Box",
            "version": "1",
            "description": "Calls of the RPC over plain HTTP. docs/wire.md describes streams, tokens and errors.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": {"/rpc": {"post": {
            "operationId": "call",
            "summary": "Call an action",
            "description": "With `Accept: text/event-stream` or `application/x-ndjson`, the response is a stream of \
                chunks that ends with the JSON-RPC response. The end of the request cancels the call.",
            "requestBody": {
                "required": true,
                "content": {"application/json": {"schema": calls, "examples": examples}},
            },
            "responses": responses_of(&responses),
        }}},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    });
    clean_descriptions(&mut document);
    document.sort_all_objects();
    document
}

/// Returns [`openapi`] as the text of the committed file.
pub fn openapi_text() -> String {
    format!("{:#}\n", openapi())
}

/// Returns the reference to a schema.
fn reference(name: &str) -> String {
    format!("#/components/schemas/{name}")
}

/// Returns the schema of a call. `params` may be absent if no member of it is required.
fn request_of(name: &str, action: &Value, contract: &Value) -> Value {
    let params = super::example::resolve(contract, &action["params"]);
    let required = match &params["required"] {
        Value::Array(members) if !members.is_empty() => json!(["method", "params"]),
        _ => json!(["method"]),
    };
    json!({
        "type": "object",
        "description": action["description"],
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["string", "integer"], "default": 1},
            "method": {"type": "string", "const": name},
            "params": action["params"],
        },
        "required": required,
    })
}

/// Returns the schema of the response to an action.
fn response_of(action: &Value) -> Value {
    let mut schema = json!({
        "type": "object",
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["string", "integer"]},
            "result": action["result"],
        },
        "required": ["jsonrpc", "id", "result"],
    });
    if let Some(chunk) = action.get("chunk") {
        // No member of the response: a stream sends it before.
        schema["x-chunk"] = chunk.clone();
    }
    schema
}

/// Returns the schema of a response with an error.
fn error() -> Value {
    json!({
        "type": "object",
        "description": "The response to a call that failed.",
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["string", "integer", "null"]},
            "error": {
                "type": "object",
                "properties": {
                    "code": {"type": "integer"},
                    "message": {"type": "string"},
                    "data": {
                        "type": "object",
                        "properties": {
                            "code": {"$ref": "#/$defs/Code"},
                            "detail": {"$ref": "#/$defs/Detail"},
                        },
                    },
                },
                "required": ["code", "message"],
            },
        },
        "required": ["jsonrpc", "id", "error"],
    })
}

/// Returns the schema of a request that the server refused before any call.
fn refusal() -> Value {
    json!({
        "type": "object",
        "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        "required": ["code", "message"],
    })
}

/// Returns the responses by status.
fn responses_of(schemas: &[Value]) -> Value {
    let mut responses = json!({"200": {
        "description": "The result or the error of the action.",
        "content": {
            "application/json": {"schema": {"anyOf": schemas}},
            "text/event-stream": {"schema": {"type": "string"}},
            "application/x-ndjson": {"schema": {"type": "string"}},
        },
    }});
    for (status, description) in [
        ("400", "The body is not a JSON-RPC request."),
        ("401", "The token is missing or wrong."),
        (
            "403",
            "The request comes from a web page of an origin that is not allowed.",
        ),
        ("413", "The body is too large."),
        ("421", "The host name is not one of this server."),
        ("503", "The server is starting or stopping."),
    ] {
        let schema = json!({"schema": {"$ref": reference("Refusal")}});
        responses[status] =
            json!({"description": description, "content": {"application/json": schema}});
    }
    responses
}

/// Returns the names of the models that the actions of a client refer to, directly or through others.
pub(super) fn models_of(contract: &Value) -> BTreeSet<String> {
    let mut wanted = Vec::new();
    turn_references(&mut contract["actions"].clone(), &mut wanted);
    wanted.extend(["Code".to_owned(), "Detail".to_owned()]);
    let mut names = BTreeSet::new();
    while let Some(name) = wanted.pop() {
        if !names.contains(&name) {
            turn_references(&mut contract["$defs"][&name].clone(), &mut wanted);
            names.insert(name);
        }
    }
    names
}

/// Replaces references into `$defs`, and collects the names of their models.
fn turn_references(value: &mut Value, models: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (key, member) in members {
                let name = member
                    .as_str()
                    .and_then(|text| text.strip_prefix("#/$defs/"));
                if let Some(name) = name.filter(|_| key == "$ref") {
                    let name = name.to_owned();
                    *member = reference(&name).into();
                    models.push(name);
                } else {
                    turn_references(member, models);
                }
            }
        }
        Value::Array(items) => items
            .iter_mut()
            .for_each(|item| turn_references(item, models)),
        _ => {}
    }
}
