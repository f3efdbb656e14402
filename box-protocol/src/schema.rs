//! The JSON Schema of the contract, made from the types that are on the wire.
//!
//! It is committed as `docs/schema/contract.json`; `cargo xtask schema` writes it, and a test fails when the two
//! differ. It says what a decoder takes: parameters refuse members they do not know, results and chunks do not.
//! What a schema cannot say (bytes of a text, two members that must agree) stands in a description.
//!
//! `rules` holds the schemas that are written by hand, because so is the decoding they describe.

mod rules;

use box_rpc::{Action as _, Hello, HelloParams, HelloResult};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use crate::actions::{AGENT_SCHEMAS, ALL_SCHEMAS, FileChange};
use crate::error::{Code, Detail};
use crate::langbot::SessionView;
use crate::model::{BoxManagedProcessInfo, BoxManagedProcessSpec, BoxProfile, BoxSpec};

pub(crate) use rules::{
    INSIDE, NO_NUL, NORMALIZED, NOT_BLANK, OF_HOST, TRIMMED_ID, asked_id, code_by_status,
    described, id, open_list,
};

/// Tells an action, and leaves the models it names with the generator.
pub(crate) type Describe = fn(&mut SchemaGenerator) -> ActionSchema;

/// One action, told.
pub(crate) struct ActionSchema {
    pub(crate) name: &'static str,
    /// The action's documentation, as it was written.
    pub(crate) doc: &'static str,
    pub(crate) params: Schema,
    pub(crate) result: Schema,
    pub(crate) chunk: Option<Schema>,
}

/// An action that can be told.
pub(crate) trait Described {
    /// See [`Describe`].
    fn describe(generator: &mut SchemaGenerator) -> ActionSchema;
}

impl Described for Hello {
    fn describe(generator: &mut SchemaGenerator) -> ActionSchema {
        ActionSchema {
            name: Self::NAME,
            doc: "Says who calls, in which versions, and with which token. The first call where a token is needed, \
                optional elsewhere. A wrong token closes the connection.",
            params: generator.subschema_for::<HelloParams>(),
            result: generator.subschema_for::<HelloResult>(),
            chunk: None,
        }
    }
}

/// The whole contract: `actions` and, for runtimes, `agent_actions`, each with its `params`, `result` and, if it
/// streams, `chunk`; all models are in `$defs`. Always in the same order.
pub fn contract() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let actions = told(
        [Hello::describe as Describe].iter().chain(ALL_SCHEMAS),
        &mut generator,
    );
    let agent_actions = told(AGENT_SCHEMAS, &mut generator);
    // Models that no action names: lines of a log, details of an error, configuration, LangBot's views.
    let models: [fn(&mut SchemaGenerator) -> Schema; 8] = [
        reach::<BoxSpec>,
        reach::<BoxProfile>,
        reach::<BoxManagedProcessSpec>,
        reach::<BoxManagedProcessInfo>,
        reach::<SessionView<'static>>,
        reach::<FileChange>,
        reach::<Detail>,
        reach::<Code>,
    ];
    for model in models {
        model(&mut generator);
    }
    let mut contract = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The contract of Box",
        "description": "Every action and every model. Written by `cargo xtask schema`; see docs/wire.md for the \
            messages that carry them. The reserved member `_meta` of JSON-RPC parameters is the engine's and not \
            shown here.",
        "actions": actions,
        "agent_actions": agent_actions,
        "$defs": generator.take_definitions(true),
    });
    plain(&mut contract);
    contract.sort_all_objects();
    contract
}

/// [`contract`] as it is committed.
pub fn contract_text() -> String {
    format!("{:#}\n", contract())
}

/// The actions a host may ask for, as a table in Markdown: name, first sentence, whether it streams.
pub fn actions_table() -> String {
    let mut generator = SchemaGenerator::default();
    let rows = [Hello::describe as Describe].iter().chain(ALL_SCHEMAS);
    let rows = rows.map(|describe| {
        let action = describe(&mut generator);
        let does = prose(action.doc);
        let does = does.split_inclusive(". ").next().unwrap_or_default().trim();
        let streams = if action.chunk.is_some() { "yes" } else { "" };
        format!("| `{}` | {does} | {streams} |\n", action.name)
    });
    let head = "| action | does | streams |\n|---|---|---|\n".to_owned();
    std::iter::once(head).chain(rows).collect()
}

fn reach<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

fn told<'a>(
    actions: impl IntoIterator<Item = &'a Describe>,
    generator: &mut SchemaGenerator,
) -> Map<String, Value> {
    let actions = actions.into_iter().map(|describe| {
        let action = describe(generator);
        let mut told = json!({
            "description": prose(action.doc),
            "params": action.params,
            "result": action.result,
        });
        if let Some(chunk) = action.chunk {
            told["chunk"] = chunk.to_value();
        }
        (action.name.to_owned(), told)
    });
    actions.collect()
}

/// Documentation on one line, without the links that only Rust has.
fn prose(doc: &str) -> String {
    let words: Vec<_> = doc.split_whitespace().collect();
    let text = words.join(" ");
    let mut parts = text.split("[`");
    let mut prose = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("`]").unwrap_or((part, ""));
        let target = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        prose.extend(["`", name, "`", target.map_or(rest, |(_, rest)| rest)]);
    }
    prose
}

/// Every description in prose.
fn plain(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member {
                    Value::String(text) if name == "description" => *text = prose(text),
                    member => plain(member),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(plain),
        _ => {}
    }
}

#[cfg(test)]
pub(crate) mod tests;
