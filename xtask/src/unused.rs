//! Dependencies that a manifest names and no source of the package uses.
//!
//! The check searches sources by name. It takes milliseconds and needs no tool, but a crate that only a comment
//! mentions counts as used.

use std::fs;

use crate::{
    Result,
    hygiene::files,
    manifest::{Manifest, Package},
};

/// Fails with the list of unused dependencies.
pub(crate) fn check(manifest: &Manifest) -> Result {
    let mut unused = Vec::new();
    for package in &manifest.packages {
        let sources = sources(package)?;
        for dependency in &package.dependencies {
            let name = dependency.replace('-', "_");
            if !sources.iter().any(|source| uses(source, &name)) {
                unused.push(format!("  {} does not use `{dependency}`", package.name));
            }
        }
    }
    if unused.is_empty() {
        return Ok(());
    }
    Err(format!("unused dependencies:\n{}", unused.join("\n")).into())
}

fn sources(package: &Package) -> Result<Vec<String>> {
    let mut sources = Vec::new();
    for path in files(&package.folder)? {
        if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(fs::read_to_string(&path)?);
        }
    }
    Ok(sources)
}

/// Returns whether a source contains `name::…` or `use name` as a whole word.
fn uses(source: &str, name: &str) -> bool {
    source.match_indices(name).any(|(start, _)| {
        let (before, after) = (&source[..start], &source[start + name.len()..]);
        if before.ends_with(in_word) || after.starts_with(in_word) {
            return false;
        }
        after.starts_with("::") || before.ends_with("use ") || before.ends_with("extern crate ")
    })
}

fn in_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::uses;

    #[test]
    fn paths_imports_and_attributes_are_uses() {
        for source in [
            "use serde;",
            "use serde::Serialize;",
            "#[serde::x]",
            "<serde::A>",
        ] {
            assert!(uses(source, "serde"), "{source}");
        }
    }

    #[test]
    fn longer_names_and_plain_words_are_not_uses() {
        for source in [
            "use serde_json::Value;",
            "my_serde::x",
            "// serde is nice",
            "",
        ] {
            assert!(!uses(source, "serde"), "{source}");
        }
    }
}
