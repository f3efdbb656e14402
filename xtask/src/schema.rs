//! Files generated from the contract: its JSON Schema, the OpenAPI document, and the pages about actions.

use std::fs;

use crate::{
    Result,
    command::{self, Workspace},
};

/// The whole files, and what prints each.
const FILES: [(&str, &str); 3] = [
    ("docs/schema/contract.json", "contract"),
    ("docs/schema/openapi.json", "openapi"),
    ("docs/contract.md", "page"),
];
const WIRE: &str = "docs/wire.md";
/// The markers around the list in the wire reference.
const BEGIN: &str = "<!-- actions: written by `cargo xtask schema` -->\n";
const END: &str = "<!-- /actions -->\n";

/// Writes all files; a test of `box-protocol` fails if they are outdated.
pub(crate) fn write(workspace: &Workspace) -> Result {
    let print = |what: &str| {
        let cargo = "run --quiet --package box-protocol --features schema --bin box-schema --";
        command::output(workspace.cargo(cargo).arg(what))
    };
    for (file, what) in FILES {
        fs::write(workspace.root().join(file), print(what)?)?;
        println!("wrote {file}");
    }
    let wire = workspace.root().join(WIRE);
    let text = replace(&fs::read_to_string(&wire)?, &print("actions")?)?;
    fs::write(wire, text)?;
    println!("wrote the list in {WIRE}");
    Ok(())
}

/// Replaces the list between the markers.
fn replace(text: &str, list: &str) -> Result<String> {
    let marked = text.split_once(BEGIN);
    let marked = marked.and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = marked.ok_or_else(|| format!("{WIRE} has no marks {BEGIN}and {END}"))?;
    Ok(format!("{before}{BEGIN}{list}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::{BEGIN, END, replace};

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let text = format!("a\n{BEGIN}old\n{END}b\n");
        let new = replace(&text, "new\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}new\n{END}b\n"));
        assert_eq!(replace(&new, "new\n").unwrap(), new);
        assert!(replace("a", "new").is_err());
    }
}
