//! Settings of the images of a runtime.

use std::collections::BTreeMap;
use std::path::PathBuf;

use box_image::{Limits, Reference};

use crate::egress::Proxy;

/// Settings of the images of a runtime.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ImagesConfig {
    /// Private directory of the store. The runtime creates it at the first use.
    pub directory: PathBuf,
    /// Directory of the catalog, whose snapshots use images. It may be absent.
    pub catalog: PathBuf,
    /// Directory of the records of boxes without a sandbox, which use images. It may be absent.
    pub stopped: PathBuf,
    /// Private file with the passwords of registries.
    pub passwords: PathBuf,
    /// Root directories by image name, beside the store.
    pub roots: BTreeMap<String, PathBuf>,
    /// Whether to refuse a box that would use the system directories of the machine.
    pub strict: bool,
    /// Repositories that callers other than the user of the server may pull.
    pub allow_pull: Vec<PullRule>,
    /// Mirrors (`HOST[:PORT]`) by registry.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Registries (`HOST[:PORT]`) without TLS.
    pub insecure_registries: Vec<String>,
    /// Files with further certificate authorities in PEM.
    pub ca_files: Vec<PathBuf>,
    /// Docker's `config.json`, which may have further passwords.
    pub docker_config: Option<PathBuf>,
    /// HTTP proxy for connections to registries on other machines.
    pub proxy: Option<Proxy>,
    /// Limits of one image.
    pub limits: Limits,
}

impl ImagesConfig {
    /// Returns the defaults with a store and a password file in this directory.
    pub fn in_directory(state: impl Into<PathBuf>) -> Self {
        let state = state.into();
        Self {
            directory: state.join("images"),
            catalog: state.join("catalog"),
            stopped: state.join("stopped"),
            passwords: state.join("registries.json"),
            roots: BTreeMap::new(),
            strict: false,
            allow_pull: Vec::new(),
            mirrors: BTreeMap::new(),
            insecure_registries: Vec::new(),
            ca_files: Vec::new(),
            docker_config: box_image::docker_config_path(),
            proxy: None,
            limits: Limits::default(),
        }
    }
}

/// Repositories that a caller may pull: one, or all that begin with a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullRule {
    text: String,
    is_prefix: bool,
}

impl PullRule {
    fn allows(&self, reference: &Reference) -> bool {
        let name = reference.name();
        if self.is_prefix {
            name.starts_with(&self.text)
        } else {
            name == self.text
        }
    }
}

/// Returns whether one of the rules allows a pull.
pub(super) fn is_allowed(rules: &[PullRule], reference: &Reference) -> bool {
    rules.iter().any(|rule| rule.allows(reference))
}

impl std::str::FromStr for PullRule {
    type Err = String;

    /// Parses a repository as in a reference, or a full one that ends with `*`.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(prefix) = text.strip_suffix('*') else {
            let named: Reference = text.parse().map_err(|error| format!("{error}"))?;
            let name = named.name();
            let plain = text.rsplit('/').next().unwrap_or(text);
            if plain.contains([':', '@']) {
                return Err(format!(
                    "`{text}` has a tag or a digest; use a repository, such as {name}"
                ));
            }
            return Ok(Self {
                text: name,
                is_prefix: false,
            });
        };
        // Without a registry, `debian*` would match nothing, and a part of a host another host.
        let is_full = prefix
            .split_once('/')
            .is_some_and(|(host, _)| Reference::registry_name(host).is_ok());
        if !prefix.is_empty() && !is_full {
            return Err(format!(
                "`{text}` has no registry; use REGISTRY/PATH*, such as docker.io/library/*"
            ));
        }
        Ok(Self {
            text: prefix.to_owned(),
            is_prefix: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_allows_one_repository_or_all_below_a_path() {
        for (rule, image, allowed) in [
            ("debian", "debian:12", true),
            (
                "debian",
                "docker.io/library/debian@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
                true,
            ),
            ("debian", "debian-evil", false),
            ("debian", "ghcr.io/library/debian", false),
            ("docker.io/library/*", "python", true),
            ("docker.io/library/*", "someone/python", false),
            ("ghcr.io/acme/*", "ghcr.io/acme/a/b:1", true),
            ("ghcr.io/acme/*", "ghcr.io/acme-evil/a", false),
            ("localhost:5000/*", "localhost:5000/a", true),
            ("*", "quay.io/x/y", true),
        ] {
            let rule: PullRule = rule.parse().unwrap();
            assert_eq!(
                rule.allows(&image.parse().unwrap()),
                allowed,
                "{rule:?} {image}"
            );
        }
        for bad in ["", "debian:12", "debian*", "ghcr.io*", "UPPER", "a b"] {
            assert!(bad.parse::<PullRule>().is_err(), "{bad}");
        }
    }
}
