//! Prints the generated documents of the contract for `cargo xtask schema`.
//!
//! `contract` prints the JSON Schema, `openapi` the OpenAPI document, `page` the page of all actions and models, `actions` the
//! table in `docs/wire.md`.

use std::process::ExitCode;

use box_protocol::schema;

fn main() -> ExitCode {
    let text = match std::env::args().nth(1).as_deref() {
        Some("contract") => schema::contract_text(),
        Some("openapi") => schema::openapi_text(),
        Some("page") => schema::page(),
        Some("actions") => schema::actions_table(),
        _ => {
            eprintln!("usage: box-schema contract|openapi|page|actions");
            return ExitCode::FAILURE;
        }
    };
    print!("{text}");
    ExitCode::SUCCESS
}
