//! The filter of a watch, which its id contains.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_protocol::{CommandId, Invalid};
use globset::{Glob, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};

/// The start of the ids of watches.
pub(super) const PREFIX: &str = "watch-";

/// The filter of a watch. Its id contains it, so that no server must remember it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Filter {
    #[serde(default, rename = "i", skip_serializing_if = "Vec::is_empty")]
    pub(super) include: Vec<String>,
    #[serde(default, rename = "e", skip_serializing_if = "Vec::is_empty")]
    pub(super) exclude: Vec<String>,
}

impl Filter {
    /// Returns an id with the filter.
    pub(super) fn id(&self) -> Result<CommandId, Invalid> {
        let mut id = format!("{PREFIX}{}", CommandId::fresh());
        if !self.include.is_empty() || !self.exclude.is_empty() {
            let text = serde_json::to_vec(self).unwrap_or_default();
            id.push('.');
            URL_SAFE_NO_PAD.encode_string(text, &mut id);
        }
        CommandId::new(id)
            .map_err(|_| Invalid::new("include_patterns", "the patterns are too long; use fewer"))
    }

    /// Returns the filter of an id.
    pub(super) fn of(id: &CommandId) -> Self {
        let encoded = id.as_str().split_once('.').map(|(_, encoded)| encoded);
        let text = encoded.and_then(|encoded| URL_SAFE_NO_PAD.decode(encoded).ok());
        let filter = text.and_then(|text| serde_json::from_slice(&text).ok());
        filter.unwrap_or_default()
    }

    /// Compiles the patterns.
    pub(super) fn compile(&self) -> Result<Patterns, Invalid> {
        Ok(Patterns {
            include: globs("include_patterns", &self.include)?,
            exclude: globs("exclude", &self.exclude)?,
        })
    }
}

fn globs(field: &'static str, patterns: &[String]) -> Result<GlobSet, Invalid> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let glob = Glob::new(pattern);
        set.add(glob.map_err(|error| Invalid::new(field, error.kind().to_string()))?);
    }
    let built = set.build();
    built.map_err(|error| Invalid::new(field, error.kind().to_string()))
}

/// The compiled filter of a watch.
pub(super) struct Patterns {
    include: GlobSet,
    exclude: GlobSet,
}

impl Patterns {
    /// Returns whether a change passes: by its name, its path, or a directory above it.
    pub(super) fn pass(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_excluded =
            self.exclude.is_match(path) || path.split('/').any(|part| self.exclude.is_match(part));
        let is_included =
            self.include.is_empty() || self.include.is_match(name) || self.include.is_match(path);
        is_included && !is_excluded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_watch_contains_its_filter() {
        let filter = Filter {
            include: vec!["*.py".to_owned()],
            exclude: vec!["node_modules".to_owned()],
        };
        let id = filter.id().unwrap();
        let patterns = Filter::of(&id).compile().unwrap();
        assert!(patterns.pass("/w/a.py"));
        assert!(!patterns.pass("/w/a.txt") && !patterns.pass("/w/node_modules/a.py"));
        let all = Filter::of(&Filter::default().id().unwrap());
        assert!(all.compile().unwrap().pass("/x"));
        let long = Filter {
            include: vec!["x".repeat(300)],
            exclude: Vec::new(),
        };
        assert!(long.id().is_err());
    }
}
