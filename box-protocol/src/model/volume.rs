//! Mounts of volumes.

use serde::{Deserialize, Serialize};

use super::bounds::{MAX_MOUNTS, few};
use crate::ids::ItemRef;
use crate::invalid::Invalid;
use crate::paths;

/// The mount of a volume in a box.
///
/// Created by [`new`](Self::new) or a decoder, which both apply the rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(!try_from, deny_unknown_fields))]
#[serde(try_from = "Fields")]
#[non_exhaustive]
pub struct VolumeMount {
    /// The volume, by id, name or tag.
    pub volume: ItemRef,
    /// Where it is mounted in the box: an absolute, normalized path.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::NORMALIZED)))]
    pub mount_path: String,
    /// The directory of the volume to mount, without `.` and `..`; the whole volume if absent. The
    /// runtime follows no link in it, and creates it for a read-write mount.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::RELATIVE)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sub_path: Option<String>,
    /// Whether the mount is read-only; `false` if absent.
    #[cfg_attr(feature = "schema", schemars(default))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ro: bool,
}

impl VolumeMount {
    /// A read-write mount of a whole volume.
    pub fn new(volume: ItemRef, mount_path: impl Into<String>) -> Result<Self, Invalid> {
        Self::checked(volume, mount_path.into(), None, false)
    }

    fn checked(
        volume: ItemRef,
        mount_path: String,
        sub_path: Option<String>,
        ro: bool,
    ) -> Result<Self, Invalid> {
        paths::inside("mount_path", &mount_path)?;
        if !paths::is_normalized(&mount_path) {
            return Err(Invalid::new("mount_path", "must be normalized"));
        }
        if let Some(path) = &sub_path {
            let absolute = format!("/{path}");
            paths::inside("sub_path", &absolute)?;
            if path.is_empty() || !paths::is_normalized(&absolute) {
                let rule = "must be a relative path in the volume, without . and ..";
                return Err(Invalid::new("sub_path", rule));
            }
        }
        Ok(Self {
            volume,
            mount_path,
            sub_path,
            ro,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    volume: ItemRef,
    mount_path: String,
    #[serde(default)]
    sub_path: Option<String>,
    #[serde(default)]
    ro: bool,
}

impl TryFrom<Fields> for VolumeMount {
    type Error = Invalid;

    fn try_from(fields: Fields) -> Result<Self, Invalid> {
        Self::checked(fields.volume, fields.mount_path, fields.sub_path, fields.ro)
    }
}

/// Checks the number of mounts, and that no two have the same path.
pub(super) fn check_volumes(volumes: &[VolumeMount]) -> Result<(), Invalid> {
    few("volumes", volumes.len(), MAX_MOUNTS)?;
    for (at, volume) in volumes.iter().enumerate() {
        let path = &volume.mount_path;
        if volumes[..at].iter().any(|other| other.mount_path == *path) {
            let rule = format!("two volumes have the mount_path {path}; use different paths");
            return Err(Invalid::new("volumes", rule));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json, to_value};

    use super::*;

    #[test]
    fn mount_paths_are_absolute_and_sub_paths_stay_inside() {
        let read = |mount: Value| from_value::<VolumeMount>(mount).map_err(Invalid::from);
        let full = json!({"volume": "v", "mount_path": "/v", "sub_path": "a/b", "ro": true});
        let mount = read(full.clone()).unwrap();
        assert_eq!(mount.sub_path.as_deref(), Some("a/b"));
        assert_eq!(to_value(&mount).unwrap(), full);
        let brief = VolumeMount::new(ItemRef::new("v").unwrap(), "/v").unwrap();
        assert_eq!(
            to_value(&brief).unwrap(),
            json!({"volume": "v", "mount_path": "/v"})
        );
        for (wrong, field) in [
            (json!({"mount_path": "x"}), "mount_path"),
            (json!({"mount_path": "/x/../y"}), "mount_path"),
            (json!({"mount_path": "/x", "sub_path": "../y"}), "sub_path"),
            (json!({"mount_path": "/x", "sub_path": "/y"}), "sub_path"),
            (json!({"mount_path": "/x", "sub_path": ""}), "sub_path"),
            (json!({"mount_path": "/x", "sub_path": "a\0"}), "sub_path"),
            (json!({"mount_path": "/x", "volume": "a/b"}), "item"),
            (json!({"mount_path": "/x", "mode": "rw"}), "mode"),
        ] {
            let mut mount = json!({"volume": "v"});
            mount
                .as_object_mut()
                .unwrap()
                .extend(wrong.as_object().unwrap().clone());
            assert_eq!(read(mount).unwrap_err().field(), field, "{wrong}");
        }
    }

    #[test]
    fn volumes_are_few_and_have_different_paths() {
        let mount = |path: String| VolumeMount::new(ItemRef::new("v").unwrap(), path).unwrap();
        let many =
            |count: usize| -> Vec<_> { (0..count).map(|at| mount(format!("/v{at}"))).collect() };
        assert_eq!(check_volumes(&many(64)), Ok(()));
        assert!(check_volumes(&many(65)).is_err());
        let twice = [mount("/v".to_owned()), mount("/v".to_owned())];
        assert_eq!(
            check_volumes(&twice).unwrap_err().to_string(),
            "volumes: two volumes have the mount_path /v; use different paths"
        );
    }
}
