//! What an operator learns about this machine.

use serde::Serialize;

/// The report of a backend about this machine, for an operator.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Diagnosis {
    /// The user that owns the boxes, for example `root`.
    pub user: &'static str,
    /// The source of the system directories without an image: `host` for this machine.
    pub rootfs: &'static str,
    /// The kind of disk that boxes can have.
    pub disk: &'static str,
    /// The Landlock ABI version; 0 if the kernel does not support Landlock.
    pub landlock: u32,
    /// The kernel features that boxes use.
    #[serde(rename = "primitives")]
    pub features: Vec<Feature>,
    /// Differences between the boxes of root and of an ordinary user.
    pub differences: &'static [Difference],
}

impl Diagnosis {
    /// Returns the names of the protections that this machine does not support.
    pub fn missing_protections(&self) -> impl Iterator<Item = &'static str> {
        let missing = self.features.iter().filter(|feature| !feature.present);
        missing
            .filter(|feature| feature.protects)
            .map(|feature| feature.name)
    }
}

/// A kernel feature that boxes use.
#[derive(Debug, Clone, Serialize)]
pub struct Feature {
    /// The name that the backend reports if the feature is missing.
    pub name: &'static str,
    /// Whether the backend refuses to create a box without the feature.
    pub required: bool,
    /// The purpose of the feature, or the effect of its absence.
    pub about: &'static str,
    /// Whether this machine provides the feature to the current user.
    pub present: bool,
    /// Whether the feature is a protection of the box.
    #[serde(skip)]
    pub protects: bool,
}

/// A difference between the boxes of root and of an ordinary user.
#[derive(Debug, Serialize)]
pub struct Difference {
    /// The property that differs.
    pub what: &'static str,
    /// The value for boxes of root.
    pub as_root: &'static str,
    /// The value for boxes of an ordinary user.
    pub as_ordinary_user: &'static str,
}
