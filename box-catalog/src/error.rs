//! Errors of the store.

use std::io;

use box_protocol::catalog::CatalogKind;
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, Invalid, ItemId};

/// Why an operation on the catalog failed. No message contains a path of the host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such item exists for this viewer.
    #[error("{kind} {item} not found")]
    NotFound {
        /// The kind that was asked for.
        kind: CatalogKind,
        /// The item as the caller named it.
        item: String,
    },
    /// Another item has the name or a tag.
    #[error("{field}: {name} is taken by another {kind}; choose another name")]
    NameTaken {
        /// The kind.
        kind: CatalogKind,
        /// The field with the name.
        field: &'static str,
        /// The name.
        name: String,
    },
    /// The owner has too many items of one kind.
    #[error("{kind}: {max} exist, which is the limit items_per_owner; delete some")]
    TooMany {
        /// The kind.
        kind: CatalogKind,
        /// The limit.
        max: usize,
    },
    /// A volume, or all volumes of its owner together, would be too large.
    #[error(
        "size_mb: {asked} MiB are above the limit {limit}, {max} MiB; ask for less, or delete volumes"
    )]
    TooLarge {
        /// The limit.
        limit: &'static str,
        /// The size that was asked for, with the other volumes if the limit counts them.
        asked: u64,
        /// The maximum.
        max: u64,
    },
    /// The snapshots and checkpoints of an owner are larger than the limit.
    #[error(
        "snapshot: {asked} MiB of all snapshots and checkpoints are above the limit max_snapshots_mb_per_owner, {max} MiB; delete snapshots, or boxes with checkpoints"
    )]
    SnapshotsTooLarge {
        /// The size of all of them with the new one.
        asked: u64,
        /// The maximum.
        max: u64,
    },
    /// The record of an item cannot be read.
    #[error("{kind} {id}: its record is damaged; restore it from a copy, or delete the item")]
    Damaged {
        /// The kind.
        kind: CatalogKind,
        /// The id of the item.
        id: ItemId,
    },
    /// A value breaks a rule.
    #[error("{0}")]
    Invalid(Invalid),
    /// Another process uses the store.
    #[error("catalog: another server uses it; stop that one, or use another state directory")]
    Locked,
    /// The disk is full.
    #[error("catalog: no space left on its disk; delete items or enlarge the disk")]
    Full,
    /// The disk cannot be read or written.
    #[error("catalog: cannot {0}")]
    Storage(String),
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn not_found(kind: CatalogKind, item: &str) -> Self {
        Self::NotFound {
            kind,
            item: item.to_owned(),
        }
    }

    pub(crate) fn storage(step: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            kind => Self::Storage(format!("{step}: {kind}")),
        }
    }

    /// Returns the code of the error.
    pub fn code(&self) -> Code {
        match self {
            Self::NotFound { .. } => Code::NotFound,
            Self::NameTaken { .. } | Self::Locked => Code::Conflict,
            Self::TooMany { .. }
            | Self::TooLarge { .. }
            | Self::SnapshotsTooLarge { .. }
            | Self::Full => Code::Capacity,
            Self::Damaged { .. } => Code::Unavailable,
            Self::Invalid(_) => Code::Validation,
            Self::Storage(_) => Code::Internal,
        }
    }
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid)
    }
}

impl From<Error> for BoxError {
    fn from(error: Error) -> Self {
        let detail = match &error {
            Error::Invalid(invalid) => return invalid.clone().into(),
            Error::NotFound { kind, .. } => Detail::about((*kind).into()),
            Error::NameTaken { kind, field, .. } => Detail::of_field(field).of((*kind).into()),
            Error::TooMany { kind, max } => Detail {
                limit: Some("items_per_owner".to_owned()),
                max: u64::try_from(*max).ok(),
                ..Detail::about((*kind).into())
            },
            Error::TooLarge { limit, max, .. } => Detail {
                limit: Some((*limit).to_owned()),
                max: Some(*max),
                ..Detail::of_field("size_mb").of(CatalogKind::Volume.into())
            },
            Error::SnapshotsTooLarge { max, .. } => Detail {
                limit: Some("max_snapshots_mb_per_owner".to_owned()),
                max: Some(*max),
                ..Detail::about(CatalogKind::Snapshot.into())
            },
            Error::Damaged { kind, .. } => Detail::lasting().of((*kind).into()),
            Error::Locked | Error::Full | Error::Storage(_) => Detail::default(),
        };
        Self::new(error.code(), error.to_string()).with_detail(&detail)
    }
}
