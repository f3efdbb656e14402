//! Documents of images: index, manifest and configuration, as OCI and Docker write them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result, shown};
use crate::limits::{CONFIG_BYTES, LAYERS, MANIFEST_BYTES};
use crate::platform::Platform;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
pub(crate) const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";
const DOCKER_SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1";

/// Reference to content by digest.
///
/// The field `urls` is not read: a layer comes from its registry only.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Descriptor {
    pub(crate) fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            platform: None,
            annotations: BTreeMap::new(),
        }
    }
}

/// List of manifests for several platforms.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Index {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) media_type: Option<String>,
    pub(crate) manifests: Vec<Descriptor>,
}

/// Configuration and layers of one image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) media_type: Option<String>,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// A document behind a reference.
#[derive(Debug)]
pub(crate) enum Document {
    Index(Index),
    Manifest(Manifest),
}

/// The fields that decide what a document is.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    #[serde(default)]
    schema_version: u32,
    media_type: Option<String>,
    manifests: Option<serde::de::IgnoredAny>,
    layers: Option<serde::de::IgnoredAny>,
    config: Option<serde::de::IgnoredAny>,
}

impl Document {
    /// Parses a document; `header` is the type that its source states.
    ///
    /// The body and the header must agree, or a registry could show two images under one digest (CVE-2021-41190).
    pub(crate) fn parse(bytes: &[u8], header: Option<&str>) -> Result<Self> {
        let kind: Kind = json(bytes, "manifest")?;
        let header = header
            .and_then(|header| header.split(';').next())
            .map(str::trim);
        let types = [kind.media_type.as_deref(), header];
        let schema_1 = |t: &str| t.starts_with(DOCKER_SCHEMA_1);
        if kind.schema_version == 1 || types.into_iter().flatten().any(schema_1) {
            return Err(Error::unsupported(
                "manifest: Docker schema 1 is not supported; push the image again with a current tool",
            ));
        }
        if kind.schema_version != 2 {
            return Err(Error::invalid(format!(
                "manifest: schemaVersion is {}; only 2 is supported",
                kind.schema_version
            )));
        }
        if kind.manifests.is_some() && (kind.layers.is_some() || kind.config.is_some()) {
            return Err(Error::invalid(
                "manifest: it is both an index and a manifest; push the image again",
            ));
        }
        let is_index = kind.manifests.is_some();
        for stated in types.into_iter().flatten() {
            let index = match stated {
                OCI_INDEX | DOCKER_INDEX => true,
                OCI_MANIFEST | DOCKER_MANIFEST => false,
                // The type of a server or of a file that knows none.
                "" | "application/json" | "application/octet-stream" | "text/plain" => continue,
                other => {
                    return Err(Error::unsupported(format!(
                        "manifest: the type `{}` is not supported; use an OCI or Docker image",
                        shown(other)
                    )));
                }
            };
            if index != is_index {
                return Err(Error::invalid(format!(
                    "manifest: its content is not of its type `{stated}`; push the image again"
                )));
            }
        }
        if is_index {
            return Ok(Self::Index(json(bytes, "index")?));
        }
        let manifest: Manifest = json(bytes, "manifest")?;
        manifest.check()?;
        Ok(Self::Manifest(manifest))
    }
}

impl Index {
    /// Returns the manifest for a platform.
    pub(crate) fn choose(&self, wanted: &Platform) -> Result<&Descriptor> {
        let suits = |manifest: &&Descriptor| match &manifest.platform {
            Some(platform) => wanted.suits(platform),
            // The configuration names the platform; it is checked later.
            None => Some(0),
        };
        // The first of the best, as others choose.
        let best = self.manifests.iter().rev().max_by_key(suits);
        best.filter(|manifest| suits(manifest).is_some())
            .ok_or_else(|| {
                let platforms = self.manifests.iter().filter_map(|m| m.platform.as_ref());
                let mut offered: Vec<_> = platforms.map(ToString::to_string).collect();
                offered.retain(|platform| platform != "unknown/unknown");
                offered.dedup();
                Error::not_found(format!(
                    "image: it has no {wanted}, only {}; use another image",
                    shown(&offered.join(", "))
                ))
            })
    }
}

impl Manifest {
    fn check(&self) -> Result<()> {
        let config = &self.config;
        if !matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG) {
            return Err(Error::unsupported(format!(
                "manifest: its content is `{}`, not an image; use another reference",
                shown(&config.media_type)
            )));
        }
        if config.size > CONFIG_BYTES {
            return Err(Error::too_large(
                "configuration",
                "config_bytes",
                CONFIG_BYTES,
            ));
        }
        if self.layers.len() > LAYERS {
            return Err(Error::too_large("manifest", "layers", LAYERS as u64));
        }
        self.layers.iter().try_for_each(check_layer_type)
    }
}

/// Refuses content that is not a layer. The compression is found in the content itself.
fn check_layer_type(layer: &Descriptor) -> Result<()> {
    let stated = layer.media_type.as_str();
    let base = stated
        .replace(".nondistributable.", ".")
        .replace(".foreign.", ".");
    let known = [OCI_LAYER, DOCKER_LAYER].iter().any(|known| {
        base.strip_prefix(known)
            .is_some_and(|rest| matches!(rest, "" | "+gzip" | ".gzip" | "+zstd" | ".zstd"))
    });
    if known {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "layer: the type `{}` is not supported; use tar, gzip or zstd",
        shown(stated)
    )))
}

/// The settings of an image that a box honours.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Environment variables as `NAME=VALUE`.
    #[serde(default)]
    pub env: Vec<String>,
    /// User as `NAME`, `UID`, `NAME:GROUP` or `UID:GID`; empty for root.
    #[serde(default)]
    pub user: String,
    /// Working directory; empty for the root directory.
    #[serde(default)]
    pub working_dir: String,
    /// Program and arguments before the command.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Command, or arguments of the entrypoint.
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Ports as `PORT/PROTOCOL`.
    #[serde(default)]
    pub exposed_ports: Vec<String>,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// An image's configuration as it is stored in registries.
#[derive(Debug, Deserialize)]
pub(crate) struct ConfigFile {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: Option<String>,
    #[serde(default)]
    config: Option<ConfigFields>,
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Option<Vec<Digest>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ConfigFields {
    user: Option<String>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    exposed_ports: Option<BTreeMap<String, serde_json::Value>>,
    labels: Option<BTreeMap<String, String>>,
}

impl ConfigFile {
    /// Parses a configuration and checks it against its manifest and this machine.
    pub(crate) fn parse(bytes: &[u8], manifest: &Manifest, wanted: &Platform) -> Result<Self> {
        let file: Self = json(bytes, "configuration")?;
        let (layers, diffs) = (manifest.layers.len(), file.diff_ids().len());
        if layers != diffs {
            return Err(Error::invalid(format!(
                "configuration: it names {diffs} layers, the manifest {layers}; push the image again"
            )));
        }
        // An image that was made by hand may name no platform.
        if let Some(platform) = file.platform()
            && wanted.suits(&platform).is_none()
        {
            return Err(Error::unsupported(format!(
                "image: it is for {}, this machine is {wanted}; use another image",
                shown(&platform.to_string())
            )));
        }
        Ok(file)
    }

    pub(crate) fn diff_ids(&self) -> &[Digest] {
        self.rootfs.diff_ids.as_deref().unwrap_or_default()
    }

    pub(crate) fn platform(&self) -> Option<Platform> {
        (!self.architecture.is_empty() && !self.os.is_empty()).then(|| Platform {
            os: self.os.clone(),
            architecture: self.architecture.clone(),
            variant: self.variant.clone().filter(|variant| !variant.is_empty()),
        })
    }

    pub(crate) fn settings(self) -> ImageConfig {
        let fields = self.config.unwrap_or_default();
        ImageConfig {
            env: fields.env.unwrap_or_default(),
            user: fields.user.unwrap_or_default(),
            working_dir: fields.working_dir.unwrap_or_default(),
            entrypoint: fields.entrypoint.unwrap_or_default(),
            cmd: fields.cmd.unwrap_or_default(),
            exposed_ports: fields
                .exposed_ports
                .unwrap_or_default()
                .into_keys()
                .collect(),
            labels: fields.labels.unwrap_or_default(),
        }
    }
}

/// Parses JSON of at most the size of a manifest.
pub(crate) fn json<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T> {
    if bytes.len() as u64 > MANIFEST_BYTES {
        return Err(Error::too_large(what, "manifest_bytes", MANIFEST_BYTES));
    }
    serde_json::from_slice(bytes).map_err(|error| {
        Error::invalid(format!(
            "{what}: invalid: {}; push or export the image again",
            shown(&error.to_string())
        ))
    })
}

/// Writes a document of ours.
pub(crate) fn to_json(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|_| Error::Storage(format!("{what}: cannot be written")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn manifest(media_type: &str, layer: &str, layers: usize) -> String {
        let layer =
            format!(r#"{{"mediaType":"{layer}","digest":"{HEX}","size":1,"urls":["http://x/"]}}"#);
        let layers = vec![layer; layers].join(",");
        format!(
            r#"{{"schemaVersion":2{media_type},"config":{{"mediaType":"{OCI_CONFIG}","digest":"{HEX}","size":2}},"layers":[{layers}]}}"#
        )
    }

    fn refused(text: &str, header: Option<&str>) -> String {
        Document::parse(text.as_bytes(), header)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_manifest_without_a_type_is_believed_by_its_header() {
        let text = manifest("", "application/vnd.oci.image.layer.v1.tar+zstd", 1);
        for header in [Some(OCI_MANIFEST), Some(DOCKER_MANIFEST), None] {
            let parsed = Document::parse(text.as_bytes(), header).unwrap();
            assert!(matches!(parsed, Document::Manifest(_)));
        }
        assert!(refused(&text, Some(OCI_INDEX)).contains("not of its type"));
    }

    #[test]
    fn unsupported_documents_are_refused_by_name() {
        let one = r#"{"schemaVersion":1,"name":"a","fsLayers":[]}"#;
        assert!(refused(one, None).contains("schema 1"));
        let helm = manifest("", "application/vnd.oci.image.layer.v1.tar", 1)
            .replace(OCI_CONFIG, "application/vnd.cncf.helm.config.v1+json");
        assert!(refused(&helm, None).contains("helm"));
        let encrypted = manifest(
            "",
            "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
            1,
        );
        assert!(refused(&encrypted, None).contains("encrypted"));
        let sha512 = manifest("", OCI_LAYER, 1).replace("sha256:", "sha512:");
        assert!(refused(&sha512, None).contains("sha512"));
        assert!(refused("[]", None).contains("invalid"));
        assert!(refused("{\"schemaVersion\":2}", None).contains("invalid"));
    }

    /// CVE-2021-41190.
    #[test]
    fn a_document_that_is_both_index_and_manifest_is_refused() {
        let text = manifest(r#","manifests":[]"#, OCI_LAYER, 0);
        assert!(refused(&text, None).contains("both"));
    }

    #[test]
    fn more_layers_than_the_limit_are_refused() {
        let text = manifest("", OCI_LAYER, LAYERS + 1);
        assert!(refused(&text, None).contains("limit of 128"));
        assert!(Document::parse(manifest("", OCI_LAYER, LAYERS).as_bytes(), None).is_ok());
    }

    #[test]
    fn the_first_of_the_best_manifests_is_chosen() {
        let entry = |size: u32, platform: &str| {
            format!(r#"{{"mediaType":"{OCI_MANIFEST}","digest":"{HEX}","size":{size}{platform}}}"#)
        };
        let platform =
            |arch: &str| format!(r#","platform":{{"os":"linux","architecture":"{arch}"}}"#);
        let index = |entries: &[String]| {
            let text = format!(
                r#"{{"schemaVersion":2,"manifests":[{}]}}"#,
                entries.join(",")
            );
            match Document::parse(text.as_bytes(), Some(OCI_INDEX)).unwrap() {
                Document::Index(index) => index,
                Document::Manifest(_) => unreachable!(),
            }
        };
        let wanted = Platform {
            os: "linux".into(),
            architecture: "amd64".into(),
            variant: None,
        };
        let three = index(&[
            entry(1, ""),
            entry(2, &platform("amd64")),
            entry(3, &platform("amd64")),
        ]);
        assert_eq!(three.choose(&wanted).unwrap().size, 2);
        assert_eq!(
            index(&[entry(1, ""), entry(2, "")])
                .choose(&wanted)
                .unwrap()
                .size,
            1
        );
        let other = index(&[entry(1, &platform("s390x"))])
            .choose(&wanted)
            .unwrap_err();
        assert_eq!(
            other.to_string(),
            "image: it has no linux/amd64, only linux/s390x; use another image"
        );
        assert!(index(&[]).choose(&wanted).is_err());
    }
}
