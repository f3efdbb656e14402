//! `file.*`: files of a running box, which its agent accesses from inside.
//!
//! Errors: `not_found`, `denied`, `validation` (a directory instead of a file, a link loop, an
//! invalid path, range or pattern), `conflict` (the file exists, the directory is not empty,
//! `if_match`), `capacity` (no space left), `too_large`. The detail `errno` is the name of the
//! system error. Paths are absolute unless `expand` is set.

use std::collections::BTreeMap;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, CommandStartResult, actions, is_default};
use crate::blob::Blob;
use crate::error::Code;
use crate::ids::{CommandId, UploadId};
use crate::time::UnixMs;

actions! {
    /// Reads a file or a part of it, as chunks. A call without a stream returns only the file's
    /// attributes.
    FileRead = "file.read": FileReadParams => FileStatInfo | FileChunk;

    /// Writes a file atomically, in one message or in pieces. An uploaded file appears when the
    /// last piece has arrived. More than about 3 MiB in one message is `too_large`; the client then
    /// sends pieces.
    FileWrite = "file.write": FileWriteParams => FileStatInfo;

    /// Returns the attributes of several paths, each with its own outcome.
    FileStat = "file.stat": FileStatParams => FileStatResult;

    /// Replaces text in a file, atomically and with its mode unchanged.
    FileReplace = "file.replace": FileReplaceParams => FileReplaceResult;

    /// Moves or copies a file or directory.
    FileMove = "file.move": FileMoveParams => Empty;

    /// Removes files and directories.
    FileRemove = "file.remove": FileRemoveParams => Empty;

    /// Creates a directory and its parents. An existing directory is not an error.
    FileMkdir = "file.mkdir": FileMkdirParams => FileMkdirResult;

    /// Changes mode and owner.
    FileAttributes = "file.attributes": FileAttributesParams => FileStatInfo;

    /// Watches a path. The call starts a command with the role `watch`, and its log has one
    /// [`FileChange`] as JSON per line. Clients read, list and end it with `command.*`; any signal
    /// ends it. After a gap, reading resumes at the next line. A repeated id attaches. The watch
    /// exits with code 0 when the path is removed or moved away. The watch does not count as
    /// activity of the box, but a reader of it does. Errors: `not_found`, `denied` (an unreadable
    /// directory, or one of processes), `capacity` (`watched_directories`).
    FileWatch = "file.watch": FileWatchParams => CommandStartResult | CommandChunk;

    /// Reads a directory tree as a tar archive, in chunks.
    FilePack = "file.pack": FilePackParams => FileTreeResult | FileChunk;

    /// Extracts a tar archive that the client sends in pieces.
    FileUnpack = "file.unpack": FileUnpackParams => FileTreeResult;
}

/// Declares parameters of `file.*` actions: the common members, then in parentheses the required
/// ones, then the optional ones with their defaults.
macro_rules! file_params {
    ($($(#[$doc:meta])* $name:ident (
        $($(#[$required_attribute:meta])* $required:ident: $required_kind:ty,)*
    ) { $($(#[$attribute:meta])* $field:ident: $kind:ty $(= $default:expr)?,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            /// The box.
            pub box_id: $crate::ids::BoxId,
            /// User name or uid that accesses the files; the guest user if absent.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub user: Option<String>,
            /// Whether to expand `~`, `$VAR` and relative paths; `false` if absent.
            #[serde(default)]
            pub expand: bool,
            $($(#[$required_attribute])* pub $required: $required_kind,)*
            $($(#[$attribute])* pub $field: $kind,)*
        }

        impl $name {
            /// The required parameters; the others have their defaults.
            pub fn new(
                box_id: $crate::ids::BoxId,
                $($required: impl Into<$required_kind>,)*
            ) -> Self {
                Self {
                    box_id,
                    user: None,
                    expand: false,
                    $($required: $required.into(),)*
                    $($field: $crate::actions::files::file_params!(@default $($default)?),)*
                }
            }
        }
    )*};
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
}
pub(super) use file_params;

file_params! {
    /// Parameters of `file.read`.
    FileReadParams (
        /// The file.
        path: String,
    ) {
        /// The part to read; the whole file if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<FilePart>,
        /// Required etag; any if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_match: Option<String>,
    }

    /// Parameters of `file.write`.
    FileWriteParams (
        /// The file.
        path: String,
        /// The content, or a piece of it.
        data: Blob,
    ) {
        /// Whether to append to the file instead of replacing it; `false` if absent.
        #[serde(default)]
        append: bool,
        /// Whether to create missing parent directories; `false` if absent.
        #[serde(default)]
        parents: bool,
        /// Permission bits; those of the replaced file or the default if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Owner, by name or uid; unchanged if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
        /// Group, by name or gid; unchanged if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
        /// Whether the file may exist; `any` if absent.
        #[serde(default)]
        create: FileCreate,
        /// Required etag of the existing file; any if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_match: Option<String>,
        /// Extended attributes of the file, by name without the namespace `user`; none if absent. At most 4 KiB
        /// together.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        xattrs: BTreeMap<String, String>,
        /// Position of the piece in an upload; absent if `data` is the whole content.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        upload: Option<UploadPiece>,
    }

    /// Parameters of `file.stat`.
    FileStatParams (
        /// The paths.
        paths: Vec<String>,
    ) {
        /// Whether to follow symbolic links; `false` if absent.
        #[serde(default)]
        follow: bool,
    }

    /// Parameters of `file.replace`.
    FileReplaceParams (
        /// The file.
        path: String,
        /// The text to replace; empty with `insert_line`.
        old: String,
        /// The replacement.
        new: String,
    ) {
        /// Required number of occurrences of `old` in the file; any if absent. Another number is a
        /// `conflict`, and the file stays.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expect: Option<u64>,
        /// Whether to replace only the first occurrence; `false` if absent.
        #[serde(default)]
        first_only: bool,
        /// Line after which to insert `new`, 0 for the start of the file; replaces `old` if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        insert_line: Option<u64>,
    }

    /// Parameters of `file.move`.
    FileMoveParams (
        /// The source path.
        src: String,
        /// The destination path.
        dest: String,
    ) {
        /// Whether to copy instead of moving; `false` if absent.
        #[serde(default)]
        keep_source: bool,
        /// Whether to replace an existing destination; `false` if absent.
        #[serde(default)]
        overwrite: bool,
        /// Whether to create missing parent directories; `false` if absent.
        #[serde(default)]
        parents: bool,
    }

    /// Parameters of `file.remove`.
    FileRemoveParams (
        /// The paths to remove.
        paths: Vec<String>,
    ) {
        /// Whether to remove directories with their contents; `false` if absent.
        #[serde(default)]
        recursive: bool,
        /// Whether to ignore missing paths; `false` if absent.
        #[serde(default)]
        missing_ok: bool,
    }

    /// Parameters of `file.mkdir`.
    FileMkdirParams (
        /// The directory.
        path: String,
    ) {
        /// Permission bits; the default if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Owner, by name or uid; the caller's user if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
        /// Group, by name or gid; the group of the caller's user if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    }

    /// Parameters of `file.attributes`. Absent attributes stay unchanged.
    FileAttributesParams (
        /// The file or directory.
        path: String,
    ) {
        /// Permission bits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Owner, by name or uid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
        /// Group, by name or gid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    }

    /// Parameters of `file.watch`.
    FileWatchParams (
        /// A directory with its entries, or one file by name. A replaced file stays watched.
        path: String,
    ) {
        /// Whether to watch all subdirectories; `false` if absent. Symbolic links are not followed.
        #[serde(default)]
        recursive: bool,
        /// The id of the watch command. If absent, the id is generated, and the watch ends when an
        /// open call is dropped.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        command_id: Option<CommandId>,
        /// How to stream the log; the call returns after the start if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attach: Option<AttachOptions>,
    }

    /// Parameters of `file.pack`.
    FilePackParams (
        /// The file or directory.
        path: String,
    ) {
        /// Limits of the archive; only those of the server if absent.
        #[serde(default)]
        caps: TreeCaps,
    }

    /// Parameters of `file.unpack`.
    FileUnpackParams (
        /// The destination directory.
        path: String,
        /// A piece of the archive.
        data: Blob,
        /// Position of the piece in the upload.
        upload: UploadPiece,
    ) {
        /// Limits of the archive; only those of the server if absent.
        #[serde(default)]
        caps: TreeCaps,
    }
}

/// A change of a watched file: one line in the log of a watch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileChange {
    /// The kind of change.
    pub kind: ChangeKind,
    /// The path of the file, below the watched path as requested.
    pub path: String,
    /// The previous path of a moved file; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Whether the content changed, or a new file may have content already; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub content: bool,
    /// Whether the attributes changed, or a new file got them before its name; `false` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attributes: bool,
    /// When the agent observed the change.
    pub at: UnixMs,
}

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// The path was created, moved in, or replaced. Entries of a new directory are reported at
    /// least once and may be reported twice.
    Created,
    /// The content or the attributes changed; `content` and `attributes` say which.
    Changed,
    /// The path was removed, or moved to an unwatched place.
    Removed,
    /// The path was moved, with its contents.
    Moved,
    /// Changes of the path and below were lost: too many changes at once, or too many directories.
    Overflow,
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FilePart {
    /// A byte range.
    Bytes {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes; to the end if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        len: Option<u64>,
    },
    /// A range of lines, numbered from 1.
    Lines {
        /// The first line.
        start: u64,
        /// The last line, inclusive; to the end if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        end: Option<u64>,
    },
}

/// Whether a file may exist before it is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileCreate {
    /// It may exist.
    #[default]
    Any,
    /// It must not exist.
    New,
}

/// A piece of an upload. A client may repeat a piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct UploadPiece {
    /// The upload.
    pub id: UploadId,
    /// Offset of the first byte of the piece.
    pub offset: u64,
    /// Whether this is the last piece; `false` if absent.
    #[serde(default)]
    pub done: bool,
    /// Whether to cancel the upload; `false` if absent. The agent removes the received pieces, and
    /// the call returns `cancelled`. A complete upload stays.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub abort: bool,
}

/// Limits of an archive, in addition to those of the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TreeCaps {
    /// Maximum total size of all files, in bytes; the server's limit if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Maximum number of files and directories; the server's limit if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
}

/// A piece of a file or archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileChunk {
    /// Offset of the first byte.
    pub offset: u64,
    /// The bytes.
    pub data: Blob,
}

/// The type of a file system entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A pipe, a socket or a device.
    Other,
}

/// The attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileStatInfo {
    /// The path.
    pub path: String,
    /// The type.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// The owner.
    pub owner: String,
    /// The group.
    pub group: String,
    /// Id of the owner inside the box.
    #[serde(default)]
    pub uid: u32,
    /// Id of the group inside the box.
    #[serde(default)]
    pub gid: u32,
    /// When the content was last modified.
    pub modified_at: UnixMs,
    /// When the file was created; absent if its file system does not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<UnixMs>,
    /// A tag that changes when the file changes.
    pub etag: String,
    /// The target of a symbolic link; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Extended attributes with a text, by name without the namespace `user`. Absent if the file has none, or more than
    /// 4 KiB together.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub xattrs: BTreeMap<String, String>,
}

/// Result of `file.stat`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileStatResult {
    /// The outcomes, by path as requested.
    pub paths: BTreeMap<String, FileOutcome>,
}

/// The outcome of `file.stat` for one path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileOutcome {
    /// The attributes.
    Stat(FileStatInfo),
    /// The error.
    Error(FileError),
}

/// Why the attributes of a path could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileError {
    /// The error code.
    pub code: Code,
    /// Description for people.
    pub message: String,
    /// Name of the system error; absent if the system did not report one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
}

/// Result of `file.mkdir`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct FileMkdirResult {
    /// Whether the call created the directory; `false` if it existed.
    pub created: bool,
}

/// Result of `file.replace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileReplaceResult {
    /// Number of replaced occurrences.
    pub count: u64,
}

/// Result of `file.pack` and `file.unpack`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct FileTreeResult {
    /// Number of files and directories.
    pub entries: u64,
    /// Total size of all files, in bytes.
    pub bytes: u64,
}
