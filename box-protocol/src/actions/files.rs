//! `file.*`: files of a running box, touched from inside it by its agent.
//!
//! Errors: `not_found`, `denied`, `validation` (a directory where a file is meant, a loop, a bad path,
//! range or pattern), `conflict` (exists, not empty, `if_match`), `capacity` (no room), `too_large`;
//! `errno` among the details names the system's own. Paths are absolute unless `expand` is set.

use std::collections::BTreeMap;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, CommandStartResult, actions};
use crate::blob::Blob;
use crate::error::Code;
use crate::ids::{CommandId, UploadId};
use crate::time::UnixMs;

actions! {
    /// Reads a file or a part of it; the bytes come as chunks. Called without chunks, it only tells about the file.
    FileRead = "file.read": FileReadParams => FileStatInfo | FileChunk;

    /// Writes a file: at once and atomically, or in pieces that appear when the last is there. What is too long for
    /// one message between runtime and agent, about 3 MiB, is `too_large` and comes in pieces.
    FileWrite = "file.write": FileWriteParams => FileStatInfo;

    /// Looks at several paths; each has its own answer.
    FileStat = "file.stat": FileStatParams => FileStatResult;

    /// Replaces text in a file, atomically and keeping its mode.
    FileReplace = "file.replace": FileReplaceParams => FileReplaceResult;

    /// Moves or copies.
    FileMove = "file.move": FileMoveParams => Empty;

    /// Removes files and directories.
    FileRemove = "file.remove": FileRemoveParams => Empty;

    /// Makes a directory and those above it; one that is there is no error.
    FileMkdir = "file.mkdir": FileMkdirParams => Empty;

    /// Changes mode and owner.
    FileAttributes = "file.attributes": FileAttributesParams => FileStatInfo;

    /// Watches a path: starts a command of role `watch` whose log is one [`FileChange`] as JSON a line.
    /// Read, list and end it by `command.*`, any signal ends it; after a gap, reading goes on at the
    /// next line. A repeat of its id attaches. It ends by itself, with code 0, when what it watches is
    /// removed or moved away. It does not keep its box in use; who reads it does. `not_found`, `denied`
    /// (a directory that may not be read, or of processes), `capacity` (`watched_directories`).
    FileWatch = "file.watch": FileWatchParams => CommandStartResult | CommandChunk;

    /// Reads a tree as a tar archive, in chunks.
    FilePack = "file.pack": FilePackParams => FileTreeResult | FileChunk;

    /// Writes a tree from a tar archive that comes in pieces.
    FileUnpack = "file.unpack": FileUnpackParams => FileTreeResult;
}

/// Parameters that every action on files has, and its own after them.
macro_rules! file_params {
    ($($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            /// The box.
            pub session_id: $crate::ids::SessionId,
            /// As this user, by name or number.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub user: Option<String>,
            /// Take `~`, `$VAR` and relative paths.
            #[serde(default)]
            pub expand: bool,
            $($(#[$attribute])* pub $field: $kind,)*
        }
    )*};
}
pub(super) use file_params;

file_params! {
    /// Parameters of `file.read`.
    FileReadParams {
        /// The file.
        path: String,
        /// A part of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<FilePart>,
        /// Only if it still has this etag.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_match: Option<String>,
    }

    /// Parameters of `file.write`.
    FileWriteParams {
        /// The file.
        path: String,
        /// Its bytes, or a piece of them.
        data: Blob,
        /// Add to what is there.
        #[serde(default)]
        append: bool,
        /// Make the directories above it.
        #[serde(default)]
        parents: bool,
        /// Its mode.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Its owner, by name or number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
        /// Its group, by name or number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
        /// Whether it may be there.
        #[serde(default)]
        create: FileCreate,
        /// Only if it still has this etag.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_match: Option<String>,
        /// This is one piece of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        upload: Option<UploadPiece>,
    }

    /// Parameters of `file.stat`.
    FileStatParams {
        /// What to look at.
        paths: Vec<String>,
        /// Look through links.
        #[serde(default)]
        follow: bool,
    }

    /// Parameters of `file.replace`.
    FileReplaceParams {
        /// The file.
        path: String,
        /// The text to replace; empty with `insert_line`.
        old: String,
        /// The text in its place.
        new: String,
        /// The first occurrence only.
        #[serde(default)]
        first_only: bool,
        /// Insert after this line instead; 0 for the beginning.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        insert_line: Option<u64>,
    }

    /// Parameters of `file.move`.
    FileMoveParams {
        /// What to move.
        src: String,
        /// Where to.
        dest: String,
        /// Copy instead.
        #[serde(default)]
        keep_source: bool,
        /// Replace what is there.
        #[serde(default)]
        overwrite: bool,
        /// Make the directories above it.
        #[serde(default)]
        parents: bool,
    }

    /// Parameters of `file.remove`.
    FileRemoveParams {
        /// What to remove.
        paths: Vec<String>,
        /// Directories with what is in them.
        #[serde(default)]
        recursive: bool,
        /// What is not there is no error.
        #[serde(default)]
        missing_ok: bool,
    }

    /// Parameters of `file.mkdir`.
    FileMkdirParams {
        /// The directory.
        path: String,
        /// Its mode.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Its owner, by name or number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
        /// Its group, by name or number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    }

    /// Parameters of `file.attributes`; what is absent stays.
    FileAttributesParams {
        /// The file or directory.
        path: String,
        /// Its mode.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Its owner, by name or number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
        /// Its group, by name or number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    }

    /// Parameters of `file.watch`.
    FileWatchParams {
        /// What to watch: a directory with what is in it, or one file by its name, so that it may be
        /// replaced.
        path: String,
        /// And all below it. Links are not followed.
        #[serde(default)]
        recursive: bool,
        /// The watch's command. Absent, one is made up, and the watch ends with a call that stays open
        /// and is dropped: nobody else could find it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        command_id: Option<CommandId>,
        /// Stay open and stream.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attach: Option<AttachOptions>,
    }

    /// Parameters of `file.pack`.
    FilePackParams {
        /// The file or directory.
        path: String,
        /// What may not be exceeded.
        #[serde(default)]
        caps: TreeCaps,
    }

    /// Parameters of `file.unpack`.
    FileUnpackParams {
        /// The directory.
        path: String,
        /// A piece of the archive.
        data: Blob,
        /// Which piece.
        upload: UploadPiece,
        /// What may not be exceeded.
        #[serde(default)]
        caps: TreeCaps,
    }
}

/// What happened to a watched file: one line of a watch's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileChange {
    /// What happened.
    pub kind: ChangeKind,
    /// To what, below the path that was asked for.
    pub path: String,
    /// Where it was before, if it has moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// When it was seen.
    pub at: UnixMs,
}

/// What may happen to a watched file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// Something new has this name: it was made, moved in from elsewhere, or put in the place of what was
    /// there. What is in a new directory may be told twice, never less than once.
    Created,
    /// It was written to, or its attributes were changed.
    Changed,
    /// It was removed, or moved to where nobody watches.
    Removed,
    /// It was moved, with all that is in it.
    Moved,
    /// Changes of it and of what is below it were missed: too much happened at once, or there are too
    /// many directories.
    Overflow,
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FilePart {
    /// Some bytes.
    Bytes {
        /// From here.
        offset: u64,
        /// So many; to the end if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        len: Option<u64>,
    },
    /// Some lines, counted from 1.
    Lines {
        /// From this one.
        start: u64,
        /// Up to this one and with it; to the end if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        end: Option<u64>,
    },
}

/// Whether a file may be there before it is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileCreate {
    /// It may.
    #[default]
    Any,
    /// It must not.
    New,
}

/// One piece of an upload. Repeating a piece is harmless.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct UploadPiece {
    /// The upload.
    pub id: UploadId,
    /// Where the piece begins.
    pub offset: u64,
    /// It is the last.
    #[serde(default)]
    pub done: bool,
    /// Give the upload up instead: what was sent of it is removed, and the answer is `cancelled`. One that is complete
    /// stays as it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub abort: bool,
}

/// What an archive may not exceed; the server's own caps hold as well.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TreeCaps {
    /// Bytes of all files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Files and directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
}

/// A piece of a file or an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileChunk {
    /// Where it begins.
    pub offset: u64,
    /// The bytes.
    pub data: Blob,
}

/// What something in a file system is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A pipe, a socket or a device.
    Other,
}

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileStatInfo {
    /// Where it is.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Its bytes.
    pub size: u64,
    /// Its mode.
    pub mode: u32,
    /// Its owner.
    pub owner: String,
    /// Its group.
    pub group: String,
    /// When it was last written.
    pub modified_at: UnixMs,
    /// Changes when the file does.
    pub etag: String,
    /// Where a link leads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// Answer to `file.stat`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileStatResult {
    /// By path as asked.
    pub paths: BTreeMap<String, FileOutcome>,
}

/// What came of looking at one path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileOutcome {
    /// It is there.
    Stat(FileStatInfo),
    /// It could not be looked at.
    Error(FileFault),
}

/// Why a path could not be looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileFault {
    /// The word.
    pub code: Code,
    /// For people.
    pub message: String,
    /// The name of the system's error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
}

/// Answer to `file.replace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileReplaceResult {
    /// Occurrences replaced.
    pub count: u64,
}

/// Answer to `file.pack` and `file.unpack`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct FileTreeResult {
    /// Files and directories.
    pub entries: u64,
    /// Bytes of all files.
    pub bytes: u64,
}
