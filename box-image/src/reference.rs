//! References to images, as Docker writes them.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result, shown};

/// The registry of names without a host.
pub(crate) const DOCKER_HUB: &str = "docker.io";
const DEFAULT_TAG: &str = "latest";
const NAME_MAX: usize = 255;
const TAG_MAX: usize = 128;

/// Reference to an image: `NAME[:TAG][@DIGEST]`.
///
/// A name without a host denotes Docker Hub, as with Docker: `debian` is `docker.io/library/debian:latest`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    /// Returns the registry: a host with an optional port.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns the path of the repository in its registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the tag; `None` only beside a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Returns the digest, which fixes the content.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns the full name without tag and digest.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// Returns the name as a person writes it: without what Docker fills in.
    pub fn familiar_name(&self) -> String {
        if self.registry != DOCKER_HUB {
            return self.name();
        }
        let official = self.repository.strip_prefix("library/");
        match official.filter(|name| !name.contains('/')) {
            Some(name) => name.to_owned(),
            None => self.repository.clone(),
        }
    }

    /// Returns `NAME:TAG`, the key of a tag in the store.
    pub(crate) fn tag_key(&self) -> Option<String> {
        Some(format!("{}:{}", self.name(), self.tag.as_ref()?))
    }

    /// Returns the name of a registry as references have it, from `HOST[:PORT]`.
    pub fn registry_name(text: &str) -> Result<String> {
        let bad = || {
            Error::invalid(format!(
                "registry: `{}` is not a host name; use HOST[:PORT]",
                shown(text)
            ))
        };
        // A name without a dot would denote a repository of Docker Hub.
        if !is_host(text) || text.contains('/') {
            return Err(bad());
        }
        let probe: Self = format!("{text}/x").parse().map_err(|_| bad())?;
        Ok(probe.registry)
    }

    /// Returns whether the registry is on this machine.
    pub fn is_loopback(&self) -> bool {
        is_loopback(host_of(&self.registry))
    }
}

/// Returns the host of `HOST[:PORT]`, without the brackets of an IPv6 address.
pub(crate) fn host_of(authority: &str) -> &str {
    if let Some(rest) = authority.strip_prefix('[') {
        return rest.split(']').next().unwrap_or(rest);
    }
    authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host)
}

/// Returns whether a host is this machine, whatever a name server says.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |problem: &str| {
            Error::invalid(format!(
                "image: `{}` {problem}; use NAME[:TAG][@DIGEST]",
                shown(text)
            ))
        };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse()?)),
            None => (text, None),
        };
        // A colon after the last slash begins a tag; one before it a port.
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains(['/', ']']) => (name, Some(tag)),
            _ => (rest, None),
        };
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(bad("has an invalid tag"));
        }
        if name.is_empty() {
            return Err(bad("has no name"));
        }
        if tag.is_none() && digest.is_none() && Digest::from_hex(name).is_some() {
            return Err(bad("is a bare digest"));
        }
        let (registry, path) = match name.split_once('/') {
            Some((host, path)) if is_host(host) => (host.to_owned(), path.to_owned()),
            _ => (DOCKER_HUB.to_owned(), name.to_owned()),
        };
        let registry = match registry.as_str() {
            "index.docker.io" | "registry-1.docker.io" => DOCKER_HUB.to_owned(),
            _ => registry,
        };
        if !is_authority(&registry) {
            return Err(bad("has an invalid registry"));
        }
        let repository = if registry == DOCKER_HUB && !path.contains('/') {
            format!("library/{path}")
        } else {
            path
        };
        if !is_repository(&repository) {
            return Err(bad(
                if repository.contains(|c: char| c.is_ascii_uppercase()) {
                    "has an upper-case letter in its name"
                } else {
                    "has an invalid name"
                },
            ));
        }
        if registry.len() + 1 + repository.len() > NAME_MAX {
            return Err(bad("has a name of more than 255 bytes"));
        }
        let tag = match (tag, digest) {
            (None, None) => Some(DEFAULT_TAG.to_owned()),
            (tag, _) => tag.map(str::to_owned),
        };
        Ok(Self {
            registry,
            repository,
            tag,
            digest,
        })
    }
}

/// Returns whether the first part of a name is a host, by Docker's rule.
fn is_host(part: &str) -> bool {
    part == "localhost" || part.contains(['.', ':', '[']) || part.contains(char::is_uppercase)
}

fn is_authority(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let Some((host, after)) = rest.split_once(']') else {
                return false;
            };
            if host.parse::<Ipv6Addr>().is_err() {
                return false;
            }
            match after.strip_prefix(':') {
                Some(port) => return is_port(port),
                None => return after.is_empty(),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|c| c.is_ascii_alphanumeric() || c == b'-')
    };
    host.split('.').all(label) && port.is_none_or(is_port)
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|c| c.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Returns whether a path of names is valid: lower case, joined by `.`, `_`, `__` or dashes.
fn is_repository(path: &str) -> bool {
    path.split('/').all(|name| {
        let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let edges = name.starts_with(alphanumeric) && name.ends_with(alphanumeric);
        let separators = name
            .split(alphanumeric)
            .all(|s| matches!(s, "" | "." | "_" | "__") || s.bytes().all(|c| c == b'-'));
        edges && separators
    })
}

fn is_tag(text: &str) -> bool {
    let first = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    text.len() <= TAG_MAX
        && text.bytes().next().is_some_and(first)
        && text.bytes().all(|c| first(c) || c == b'.' || c == b'-')
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Reference> for String {
    fn from(reference: Reference) -> Self {
        reference.to_string()
    }
}

impl TryFrom<String> for Reference {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn names_are_completed_as_docker_does() {
        for (text, full) in [
            ("debian", "docker.io/library/debian:latest"),
            ("debian:12", "docker.io/library/debian:12"),
            ("user/app", "docker.io/user/app:latest"),
            ("docker.io/debian", "docker.io/library/debian:latest"),
            ("index.docker.io/a/b:c", "docker.io/a/b:c"),
            ("localhost/app", "localhost/app:latest"),
            ("localhost:5000/a/b/c:V1.0_x", "localhost:5000/a/b/c:V1.0_x"),
            ("127.0.0.1:5000/app", "127.0.0.1:5000/app:latest"),
            ("[::1]:5000/app:1", "[::1]:5000/app:1"),
            ("[2001:db8::1]/app", "[2001:db8::1]/app:latest"),
            ("ghcr.io/o/a__b-c.d", "ghcr.io/o/a__b-c.d:latest"),
            ("Host/app", "Host/app:latest"),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), full);
        }
        let fixed = format!("debian@sha256:{HEX}");
        let parsed: Reference = fixed.parse().unwrap();
        assert_eq!(parsed.tag(), None);
        assert_eq!(parsed.to_string(), format!("docker.io/library/{fixed}"));
        let both = format!("ghcr.io/a/b:1@sha256:{HEX}");
        assert_eq!(both.parse::<Reference>().unwrap().to_string(), both);
    }

    #[test]
    fn familiar_names_omit_what_docker_fills_in() {
        for (text, familiar) in [
            ("debian:12", "debian"),
            ("docker.io/a/b", "a/b"),
            ("ghcr.io/a/b", "ghcr.io/a/b"),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().familiar_name(), familiar);
        }
    }

    #[test]
    fn invalid_references_are_refused_with_the_form() {
        let long = format!("a/{}", "b".repeat(260));
        let long_tag = format!("a:{}", "t".repeat(129));
        for text in [
            "",
            ":1",
            "a:",
            "A",
            "library/Debian",
            "a//b",
            "/a",
            "a/",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a:.b",
            "a:b/c:",
            "../a",
            "a/../b",
            "a b",
            "a\nb",
            "localhost:0/a",
            "localhost:99999/a",
            "localhost:+1/a",
            "[::1/a",
            "[zz]:1/a",
            "[::1]x/a",
            "http://a.b/c",
            "a@b",
            "a@sha256:1",
            "ho_st.x/a",
            "é",
            HEX,
            &long,
            &long_tag,
        ] {
            let error = text.parse::<Reference>().unwrap_err();
            assert_eq!(error.code(), box_rpc::Code::Validation, "{text}");
        }
        let error = "a:é".parse::<Reference>().unwrap_err().to_string();
        assert_eq!(
            error,
            "image: `a:é` has an invalid tag; use NAME[:TAG][@DIGEST]"
        );
        let sha512 = format!("a@sha512:{}", "0".repeat(128));
        assert!(
            sha512
                .parse::<Reference>()
                .unwrap_err()
                .to_string()
                .contains("sha512")
        );
    }

    #[test]
    fn only_this_machine_is_loopback() {
        for text in ["localhost:5000/a", "127.3.2.1/a", "[::1]:80/a"] {
            assert!(text.parse::<Reference>().unwrap().is_loopback(), "{text}");
        }
        for text in [
            "localhost.example/a",
            "127.0.0.1.example/a",
            "10.0.0.1/a",
            "debian",
        ] {
            assert!(!text.parse::<Reference>().unwrap().is_loopback(), "{text}");
        }
    }

    #[test]
    fn registries_have_one_name() {
        for (text, name) in [
            ("ghcr.io", "ghcr.io"),
            ("localhost:5000", "localhost:5000"),
            ("docker.io", "docker.io"),
            ("index.docker.io", "docker.io"),
            ("[::1]:5000", "[::1]:5000"),
        ] {
            assert_eq!(Reference::registry_name(text).unwrap(), name);
        }
        for bad in ["", "hub", "https://ghcr.io", "ghcr.io/team", "a b.c"] {
            let error = Reference::registry_name(bad).unwrap_err().to_string();
            assert!(error.starts_with("registry: "), "{error}");
        }
    }
}
