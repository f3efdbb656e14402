//! Mounts of host directories.

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;
use crate::paths;

/// Whether and how a host directory is mounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum HostPathMode {
    /// Not mounted.
    None,
    /// Read-only.
    Ro,
    /// Read-write.
    #[default]
    Rw,
    /// Read-write in the box, which keeps the changes to itself until `box.apply`. Only for the
    /// workspace.
    Overlay,
}

impl HostPathMode {
    /// Returns the name on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Ro => "ro",
            Self::Rw => "rw",
            Self::Overlay => "overlay",
        }
    }
}

/// A mount of a host directory in addition to the workspace.
///
/// Created by [`new`](Self::new) or a decoder, which both apply the rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(!try_from, deny_unknown_fields))]
#[serde(try_from = "Fields")]
#[non_exhaustive]
pub struct BoxMountSpec {
    /// The directory on the host.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::OF_HOST)))]
    pub host_path: String,
    /// Where it is mounted in the box: an absolute, normalized path.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::NORMALIZED)))]
    pub mount_path: String,
    /// How it is mounted.
    #[cfg_attr(feature = "schema", schemars(default))]
    pub mode: HostPathMode,
    /// For a content-addressed mount: `sha256:` and 64 hex digits; absent otherwise.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^sha256:[0-9a-f]{64}$")))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_digest: Option<String>,
    /// For a content-addressed mount: the host path of the manifest that the digest covers; absent
    /// otherwise.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::OF_HOST)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest_path: Option<String>,
}

impl BoxMountSpec {
    /// Creates a mount without a digest.
    pub fn new(
        host_path: impl Into<String>,
        mount_path: impl Into<String>,
        mode: HostPathMode,
    ) -> Result<Self, Invalid> {
        Self::checked(&host_path.into(), mount_path.into(), mode, None, None)
    }

    /// A read-only mount of a tree known by its digest, at the place below `root` that the digest gives it.
    pub fn content_addressed(
        host_path: impl Into<String>,
        root: &str,
        content_digest: impl Into<String>,
        manifest_path: impl Into<String>,
    ) -> Result<Self, Invalid> {
        let digest = content_digest.into();
        let hex = digest_hex(&digest)?;
        let mount_path = format!("{root}/{hex}");
        let manifest = Some(manifest_path.into());
        Self::checked(
            &host_path.into(),
            mount_path,
            HostPathMode::Ro,
            Some(digest),
            manifest,
        )
    }

    /// Whether the mount is known by its content, so that it may be added to a living box.
    pub fn is_content_addressed(&self) -> bool {
        self.mode == HostPathMode::Ro
            && self.manifest_path.is_some()
            && self
                .content_digest
                .as_deref()
                .and_then(|digest| digest_hex(digest).ok())
                .is_some_and(|hex| {
                    let root = self.mount_path.strip_suffix(hex);
                    root.is_some_and(|root| root.ends_with('/'))
                })
    }

    fn checked(
        host_path: &str,
        mount_path: String,
        mode: HostPathMode,
        content_digest: Option<String>,
        manifest_path: Option<String>,
    ) -> Result<Self, Invalid> {
        let host_path = paths::of_host("host_path", host_path)?;
        if mode == HostPathMode::Overlay {
            let rule = "overlay is for the workspace only; use ro or rw";
            return Err(Invalid::new("mode", rule));
        }
        paths::inside("mount_path", &mount_path)?;
        if !paths::is_normalized(&mount_path) {
            return Err(Invalid::new("mount_path", "must be normalized"));
        }
        if let Some(digest) = &content_digest {
            digest_hex(digest)?;
        }
        let manifest_path = manifest_path
            .map(|path| paths::of_host("manifest_path", &path))
            .transpose()?;
        Ok(Self {
            host_path,
            mount_path,
            mode,
            content_digest,
            manifest_path,
        })
    }
}

fn digest_hex(digest: &str) -> Result<&str, Invalid> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    digest
        .strip_prefix("sha256:")
        .filter(|hex| hex.len() == 64 && hex.bytes().all(is_hex))
        .ok_or_else(|| {
            Invalid::new(
                "content_digest",
                "must be sha256: and 64 lowercase hex digits",
            )
        })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    host_path: String,
    mount_path: String,
    #[serde(default)]
    mode: HostPathMode,
    #[serde(default)]
    content_digest: Option<String>,
    #[serde(default)]
    manifest_path: Option<String>,
}

impl TryFrom<Fields> for BoxMountSpec {
    type Error = Invalid;

    fn try_from(f: Fields) -> Result<Self, Invalid> {
        Self::checked(
            &f.host_path,
            f.mount_path,
            f.mode,
            f.content_digest,
            f.manifest_path,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(value: serde_json::Value) -> Invalid {
        serde_json::from_value::<BoxMountSpec>(value)
            .unwrap_err()
            .into()
    }

    #[test]
    fn mounts_are_writable_by_default() {
        let mount: BoxMountSpec =
            serde_json::from_value(json!({"host_path": " /data ", "mount_path": "/d"})).unwrap();
        assert_eq!(
            mount,
            BoxMountSpec::new("/data", "/d", HostPathMode::Rw).unwrap()
        );
    }

    #[test]
    fn rules_hold_on_construction_and_on_decode() {
        for (host, inside, rule) in [
            ("data", "/d", "host_path: must be an absolute host path"),
            (
                "/data",
                "d",
                "mount_path: must be an absolute path inside the sandbox",
            ),
            ("/data", "/d/../e", "mount_path: must be normalized"),
            ("/data", "/d/", "mount_path: must be normalized"),
        ] {
            let built = BoxMountSpec::new(host, inside, HostPathMode::Ro).unwrap_err();
            assert_eq!(built.to_string(), rule);
            assert_eq!(
                refused(json!({"host_path": host, "mount_path": inside})),
                built
            );
        }
        let overlay = BoxMountSpec::new("/data", "/d", HostPathMode::Overlay).unwrap_err();
        assert_eq!(
            overlay.to_string(),
            "mode: overlay is for the workspace only; use ro or rw"
        );
        let unknown = refused(json!({"host_path": "/a", "mount_path": "/b", "propagate": true}));
        assert_eq!(unknown.field(), "propagate");
    }

    #[test]
    fn a_content_addressed_mount_has_digest_manifest_and_read_only() {
        let hex = "0123456789abcdef".repeat(4);
        let of =
            |digest: String| BoxMountSpec::content_addressed("/c", "/opt/a", digest, "/m.json");
        let good = of(format!("sha256:{hex}")).unwrap();
        assert!(good.is_content_addressed());
        assert_eq!(good.mount_path, format!("/opt/a/{hex}"));
        let json = serde_json::to_value(&good).unwrap();
        assert_eq!(
            serde_json::from_value::<BoxMountSpec>(json.clone()).unwrap(),
            good
        );
        for (field, value) in [
            ("mode", json!("rw")),
            ("manifest_path", json!(null)),
            ("content_digest", json!(null)),
            ("mount_path", json!("/opt/a/other")),
            ("mount_path", json!(format!("/opt/a{hex}"))),
        ] {
            let mut plain = json.clone();
            plain[field] = value;
            let plain: BoxMountSpec = serde_json::from_value(plain).unwrap();
            assert!(!plain.is_content_addressed(), "{field}");
        }
        let upper = of(format!("sha256:{}", hex.to_uppercase()));
        assert_eq!(upper.unwrap_err().field(), "content_digest");
    }
}
