//! Images of boxes: references, a registry client, a store of unpacked trees, import and export.
//!
//! # Reading order
//! 1. `reference.rs`, `digest.rs`, `platform.rs`, `spec.rs`: names, digests, platforms and documents of images.
//!    `limits.rs` bounds everything that a registry or an image states; `error.rs` has the errors.
//! 2. `archive.rs` reads tar archives, `decode.rs` decompresses layers and computes digests, `unpack.rs` applies layers
//!    to a directory. They handle hostile content, without `unsafe` and without following links.
//! 3. `store/` keeps one unpacked tree for each image, exact after a crash.
//! 4. `build.rs` makes an image from layers, `import.rs` from files, `export.rs` writes one.
//! 5. `registry/` is the client: connections, authentication, documents and layers; `pull.rs` uses it.
//!    `progress.rs` has the reports.
//!
//! # Use
//! [`Store::open`], then [`pull`] or [`Store::import`], then [`Store::lease`] while a box uses the files of an image.
//! The methods of a store block; [`pull`] is asynchronous.

mod archive;
mod build;
mod decode;
mod digest;
mod error;
mod export;
mod import;
mod limits;
mod platform;
mod progress;
mod pull;
mod reference;
mod registry;
mod spec;
mod store;
mod unpack;

pub use digest::Digest;
pub use error::{Error, Result};
pub use export::{Archiver, ExportOptions, Tree, write_archive, write_changes};
pub use import::{ImportFormat, ImportOptions};
pub use limits::{
    ATTRIBUTE_BYTES, CONFIG_BYTES, LAYERS, Limits, MANIFEST_BYTES, PATH_BYTES, PATH_DEPTH,
};
pub use platform::Platform;
pub use progress::{Event, Phase, Progress};
pub use pull::{PullOptions, pull};
pub use reference::Reference;
pub use registry::{Credentials, Dialer, Registry, RegistryOptions, docker_config_path};
pub use spec::ImageConfig;
pub use store::{DiskUsage, Image, LayerInfo, Lease, PruneOptions, Pruned, Removed, Store, Uses};
pub use unpack::Unpacked;
