//! The platform of an image, and the choice of one from an index.

use std::env::consts::ARCH;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Platform of an image: operating system, processor and its variant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// Operating system, such as `linux`.
    pub os: String,
    /// Processor in Go's words, such as `amd64`.
    pub architecture: String,
    /// Variant of the processor, such as `v8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// Returns the platform of this machine.
    pub fn host() -> Self {
        let (architecture, variant) = match ARCH {
            "x86_64" => ("amd64", None),
            "x86" => ("386", None),
            "aarch64" => ("arm64", Some("v8")),
            "arm" => ("arm", Some("v7")),
            "powerpc64" => ("ppc64le", None),
            other => (other, None),
        };
        Self {
            os: "linux".to_owned(),
            architecture: architecture.to_owned(),
            variant: variant.map(str::to_owned),
        }
    }

    /// Returns how well an image for `other` suits this platform; `None` if it cannot run.
    ///
    /// An exact variant is better than none, and an older variant is worse than both.
    pub(crate) fn suits(&self, other: &Self) -> Option<u8> {
        if self.os != other.os || self.architecture != other.architecture {
            return None;
        }
        let (own, theirs) = (self.variant.as_deref(), other.variant.as_deref());
        match (own, theirs.filter(|variant| !variant.is_empty())) {
            (own, theirs) if own == theirs => Some(3),
            (_, None) => Some(2),
            (None, Some("v1")) if self.architecture == "amd64" => Some(2),
            (Some(own), Some(theirs)) if self.architecture == "arm" && theirs < own => Some(1),
            _ => None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) if !variant.is_empty() => write!(f, "/{variant}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(text: &str) -> Platform {
        let mut parts = text.split('/').map(str::to_owned);
        Platform {
            os: parts.next().unwrap(),
            architecture: parts.next().unwrap(),
            variant: parts.next(),
        }
    }

    #[test]
    fn the_best_variant_that_runs_is_preferred() {
        for (own, theirs, suits) in [
            ("linux/amd64", "linux/amd64", Some(3)),
            ("linux/amd64", "linux/amd64/v1", Some(2)),
            ("linux/amd64", "linux/amd64/v3", None),
            ("linux/amd64", "linux/arm64", None),
            ("linux/amd64", "windows/amd64", None),
            ("linux/arm64/v8", "linux/arm64", Some(2)),
            ("linux/arm64/v8", "linux/arm64/v8", Some(3)),
            ("linux/arm/v7", "linux/arm/v6", Some(1)),
            ("linux/arm/v7", "linux/arm/v8", None),
        ] {
            assert_eq!(
                platform(own).suits(&platform(theirs)),
                suits,
                "{own} {theirs}"
            );
        }
        assert_eq!(platform("linux/arm64/v8").to_string(), "linux/arm64/v8");
    }
}
