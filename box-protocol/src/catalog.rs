//! Volumes, templates and pools: models for clients of a sandbox service.
//!
//! Seed 004 specifies them. No action uses them yet, and the schema of the contract omits them.

use std::collections::BTreeMap;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::ids::{ItemId, Name};
use crate::model::{Labels, SpecDraft};
use crate::paths;
use crate::time::UnixMs;

/// The kind of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CatalogKind {
    /// A directory that outlives boxes.
    Volume,
    /// A spec from which boxes are created.
    Template,
    /// Boxes that the server creates in advance.
    Pool,
}

/// The state of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemState {
    /// The server is creating the item.
    Building,
    /// Boxes can use the item.
    Ready,
    /// The server could not create the item.
    Failed,
}

/// The properties of an item that its owner chooses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CatalogDraft {
    /// The name.
    pub name: Name,
    /// Labels to filter by.
    #[serde(default)]
    pub labels: Labels,
    /// For a template: the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Box<SpecDraft>>,
    /// For a template: the volumes that its boxes mount.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeMount>,
    /// For a pool: the template, by id or name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Name>,
    /// For a pool: the number of idle boxes to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// For a volume: its maximum size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// An item of the catalog.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CatalogItem {
    /// The id.
    pub id: ItemId,
    /// The kind.
    pub kind: CatalogKind,
    /// The state.
    pub state: ItemState,
    /// The properties that its owner chose.
    pub item: CatalogDraft,
    /// When the item was created.
    pub created_at: UnixMs,
    /// When the item last changed.
    pub updated_at: UnixMs,
    /// Statistics of the kind, for example `used_bytes` or `waiting`.
    #[serde(default)]
    pub figures: BTreeMap<String, u64>,
}

/// The mount of a volume in a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    /// The volume's id or name.
    pub volume: Name,
    /// The absolute path of the mount in the box.
    #[serde(deserialize_with = "mount_path")]
    pub mount_path: String,
    /// The directory of the volume to mount; the whole volume if absent.
    #[serde(
        default,
        deserialize_with = "sub_path",
        skip_serializing_if = "Option::is_none"
    )]
    pub sub_path: Option<String>,
    /// Whether the mount is read-only; `false` if absent.
    #[serde(default)]
    pub ro: bool,
}

fn mount_path<'de, D: Deserializer<'de>>(decoder: D) -> Result<String, D::Error> {
    let path = String::deserialize(decoder)?;
    paths::inside("mount_path", &path).map_err(D::Error::custom)
}

fn sub_path<'de, D: Deserializer<'de>>(decoder: D) -> Result<Option<String>, D::Error> {
    let path = Option::<String>::deserialize(decoder)?;
    let stays_inside = |path: &String| paths::is_normalized(&format!("/{path}"));
    if path.iter().all(stays_inside) {
        Ok(path)
    } else {
        Err(D::Error::custom("sub_path must stay inside the volume"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_item_decodes_with_minimal_and_full_members() {
        for (kind, item) in [
            (CatalogKind::Volume, json!({"name": "v", "size_bytes": 5})),
            (
                CatalogKind::Pool,
                json!({"name": "p", "template": "t", "replicas": 3}),
            ),
            (
                CatalogKind::Template,
                json!({"name": "t", "spec": {"box_id": "s", "memory_mb": 512},
                    "volumes": [{"volume": "v", "mount_path": "/data"}]}),
            ),
        ] {
            let name = item["name"].clone();
            let read = |item: Value, state: &str| -> CatalogItem {
                let item = json!({"id": "i", "kind": kind, "state": state, "item": item,
                    "created_at": 1, "updated_at": 2, "newer_than_this_build": true});
                serde_json::from_value(item).unwrap()
            };
            let full = read(item, "ready");
            let written = serde_json::to_value(&full).unwrap();
            assert_eq!(
                serde_json::from_value::<CatalogItem>(written).unwrap(),
                full
            );
            assert_eq!((full.id.as_str(), full.kind), ("i", kind));
            let brief = read(json!({"name": name}), "building");
            assert_eq!(brief.item.name, full.item.name);
            assert_eq!(
                (brief.state, brief.item.replicas),
                (ItemState::Building, None)
            );
            assert!(brief.item.labels.is_empty() && brief.figures.is_empty());
            let failed = read(json!({"name": name}), "failed");
            assert_eq!(failed.state, ItemState::Failed);
        }
    }

    #[test]
    fn mount_paths_are_absolute_and_sub_paths_stay_inside() {
        let read = |mount: Value| serde_json::from_value::<VolumeMount>(mount);
        let mount = read(json!({"volume": "v", "mount_path": "/v", "sub_path": "a/b", "ro": true}));
        assert_eq!(mount.unwrap().sub_path.as_deref(), Some("a/b"));
        for (mount, problem) in [
            (
                json!({"volume": "v", "mount_path": "x"}),
                "mount_path: must be",
            ),
            (
                json!({"volume": "v", "mount_path": "/x", "sub_path": "../y"}),
                "sub_path must stay",
            ),
        ] {
            let error = read(mount).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
