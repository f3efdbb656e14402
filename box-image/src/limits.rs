//! Limits on the content of images.

/// Maximum size of a manifest or an index in bytes.
pub const MANIFEST_BYTES: u64 = 4 << 20;
/// Maximum size of an image's configuration in bytes.
pub const CONFIG_BYTES: u64 = 4 << 20;
/// Maximum number of layers.
pub const LAYERS: usize = 128;
/// Maximum length of a path inside an image in bytes.
pub const PATH_BYTES: usize = 4096;
/// Maximum number of names in a path inside an image.
pub const PATH_DEPTH: usize = 128;
/// Maximum size of an entry's extended header, which holds its attributes.
pub const ATTRIBUTE_BYTES: u64 = 64 << 10;
/// Maximum size of the names of all directories of an image, which are held in memory.
pub(crate) const DIRECTORY_NAMES: u64 = 64 << 20;
/// Decoded bytes that a layer may have at any ratio.
pub(crate) const RATIO_FREE: u64 = 64 << 20;

/// Limits of one image that an operator may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of entries in all layers.
    pub entries: u64,
    /// Maximum size of all compressed layers in bytes.
    pub compressed_bytes: u64,
    /// Maximum size of all decoded layers and of the files in them in bytes.
    pub decoded_bytes: u64,
    /// Maximum ratio of a decoded layer to a compressed one.
    pub ratio: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 1_000_000,
            compressed_bytes: 16 << 30,
            decoded_bytes: 32 << 30,
            ratio: 250,
        }
    }
}
