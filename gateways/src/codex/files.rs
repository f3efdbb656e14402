//! The file system of the box: reading and writing files. The sandbox of a request is not read.

use std::collections::HashMap;

use box_protocol::UploadId;
use box_protocol::actions::{
    FileChunk, FileKind, FileMkdir, FileMkdirParams, FileMove, FileMoveParams, FilePart, FileRead,
    FileReadParams, FileRemove, FileRemoveParams, FileStatInfo, FileWrite, FileWriteParams,
    UploadPiece,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::links::{check, resolve, stat};
use super::paths::{FilePath, uri_of};
use super::session::Place;
use super::wire::{Bytes, Fault, encoded};
use crate::http::stream::{Step, StreamedCall};

/// The maximum size of a file in one answer, which is longer in base64.
const MAX_FILE_BYTES: u64 = 11 * 1024 * 1024;

/// The maximum length of a block.
const MAX_BLOCK_BYTES: u64 = 1024 * 1024;

/// The number of files that a client has open.
const MAX_HANDLES: usize = 128;

/// The maximum length of the id of an open file.
const MAX_HANDLE_ID_BYTES: usize = 32;

/// The maximum length of a piece of a file that is written.
const PIECE_BYTES: usize = 1024 * 1024;

/// A request about one path.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PathParams {
    pub(super) path: FilePath,
    #[serde(default)]
    follow_symlinks: Option<bool>,
}

/// Returns the attributes of a regular file.
async fn file(place: &Place, path: &FilePath) -> Result<FileStatInfo, Fault> {
    let stat = stat(place, path, true).await?;
    if stat.kind != FileKind::File {
        let rule = format!("path: {} is not a regular file", path.0);
        return Err(Fault::invalid_request(rule));
    }
    Ok(stat)
}

/// Reads a file or a part of it, of a version if one is named.
async fn bytes_of(
    place: &Place,
    path: &FilePath,
    part: Option<FilePart>,
    etag: Option<String>,
    max_bytes: u64,
) -> Result<Vec<u8>, Fault> {
    let params = FileReadParams {
        part,
        if_match: etag,
        ..FileReadParams::new(place.open().await?, path.0.clone())
    };
    let target = place.target.clone();
    let mut call = StreamedCall::<FileChunk, FileStatInfo>::new(|chunks| async move {
        target.forward_streamed::<FileRead>(&params, chunks).await
    });
    let mut bytes = Vec::new();
    loop {
        match call.next().await {
            Step::Chunk(chunk) => {
                bytes.extend_from_slice(&chunk.data);
                if bytes.len() as u64 > max_bytes {
                    return Err(too_long(bytes.len() as u64));
                }
            }
            Step::End(ended) => {
                ended.map_err(|error| Fault::of_file(&error))?;
                return Ok(bytes);
            }
            Step::Idle => {}
        }
    }
}

fn too_long(bytes: u64) -> Fault {
    let rule = format!(
        "path: {bytes} bytes exceed the limit of {MAX_FILE_BYTES}; use fs/open and fs/readBlock"
    );
    Fault::invalid_request(rule)
}

/// Returns the content of a file.
pub(super) async fn read(place: &Place, params: PathParams) -> Result<Value, Fault> {
    check(place, &params.path, params.follow_symlinks).await?;
    let stat = file(place, &params.path).await?;
    if stat.size > MAX_FILE_BYTES {
        return Err(too_long(stat.size));
    }
    let bytes = bytes_of(place, &params.path, None, None, MAX_FILE_BYTES).await?;
    Ok(json!({"dataBase64": encoded(bytes)}))
}

/// Files that a client reads in blocks.
#[derive(Debug, Default)]
pub(super) struct Handles(HashMap<String, Handle>);

/// A file, and the version of it that was opened.
#[derive(Debug, Clone)]
struct Handle {
    path: FilePath,
    etag: String,
    size: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OpenParams {
    handle_id: String,
    path: FilePath,
    /// Newer clients can also open a file to write it, if the server says that it can.
    #[serde(default)]
    mode: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BlockParams {
    handle_id: String,
    offset: u64,
    len: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CloseParams {
    handle_id: String,
}

impl Handles {
    pub(super) async fn open(&mut self, place: &Place, params: OpenParams) -> Result<Value, Fault> {
        let id = params.handle_id;
        let refusal = if id.len() > MAX_HANDLE_ID_BYTES {
            Some(format!(
                "handleId: longer than {MAX_HANDLE_ID_BYTES} bytes; use a shorter id"
            ))
        } else if self.0.contains_key(&id) {
            Some(format!("file handle `{id}` already exists"))
        } else if self.0.len() >= MAX_HANDLES {
            Some(format!(
                "handleId: {MAX_HANDLES} files are open, the maximum; close one"
            ))
        } else if params.mode.as_deref().is_some_and(|mode| mode != "read") {
            Some("mode: must be read; write with fs/writeFile".to_owned())
        } else {
            None
        };
        if let Some(rule) = refusal {
            return Err(Fault::invalid_request(rule));
        }
        let FileStatInfo { etag, size, .. } = file(place, &params.path).await?;
        let path = params.path;
        self.0.insert(id.clone(), Handle { path, etag, size });
        Ok(json!({"handleId": id}))
    }

    pub(super) async fn read(&self, place: &Place, params: BlockParams) -> Result<Value, Fault> {
        let id = &params.handle_id;
        let unknown = || Fault::not_found(format!("unknown file handle `{id}`"));
        let Handle { path, etag, size } = self.0.get(id).ok_or_else(unknown)?.clone();
        if !(1..=MAX_BLOCK_BYTES).contains(&params.len) {
            let rule = format!("len: must be between 1 and {MAX_BLOCK_BYTES}");
            return Err(Fault::invalid_request(rule));
        }
        let part = FilePart::Bytes {
            offset: params.offset.min(size),
            len: Some(params.len),
        };
        let bytes = bytes_of(place, &path, Some(part), Some(etag), MAX_BLOCK_BYTES).await?;
        let is_end = (bytes.len() as u64) < params.len;
        Ok(json!({"chunk": encoded(bytes), "eof": is_end}))
    }

    pub(super) fn close(&mut self, params: &CloseParams) -> Value {
        self.0.remove(&params.handle_id);
        json!({})
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WriteParams {
    path: FilePath,
    data_base64: Bytes,
    #[serde(default)]
    follow_symlinks: Option<bool>,
}

/// Writes a file, which appears when it is complete.
pub(super) async fn write(place: &Place, params: WriteParams) -> Result<Value, Fault> {
    check(place, &params.path, params.follow_symlinks).await?;
    let box_id = place.open().await?;
    let (id, data) = (UploadId::fresh(), params.data_base64.0);
    let mut offset = 0;
    loop {
        let end = data.len().min(offset + PIECE_BYTES);
        let piece = data[offset..end].to_vec();
        let is_last = end == data.len();
        let write = FileWriteParams {
            upload: (data.len() > PIECE_BYTES).then(|| UploadPiece {
                id: id.clone(),
                offset: offset as u64,
                done: is_last,
                abort: false,
            }),
            ..FileWriteParams::new(box_id.clone(), params.path.0.clone(), piece)
        };
        let written = place.target.forward::<FileWrite>(&write).await;
        written.map_err(|error| Fault::of_file(&error))?;
        offset = end;
        if is_last {
            return Ok(json!({}));
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreateParams {
    path: FilePath,
    #[serde(default)]
    recursive: Option<bool>,
    #[serde(default)]
    follow_symlinks: Option<bool>,
}

/// Creates a directory, and those above it unless the client asks for one alone.
pub(super) async fn create_directory(place: &Place, params: CreateParams) -> Result<Value, Fault> {
    let CreateParams {
        path,
        recursive,
        follow_symlinks,
    } = params;
    check(place, &path, follow_symlinks).await?;
    let is_alone = !recursive.unwrap_or(true);
    let parent = path.0.rsplit_once('/').map_or("", |(parent, _)| parent);
    if is_alone {
        stat(place, &FilePath::normalized(parent), true).await?;
    }
    let create = FileMkdirParams::new(place.open().await?, path.0.clone());
    let created = place.target.forward::<FileMkdir>(&create).await;
    let created = created.map_err(|error| Fault::of_file(&error))?.created;
    if is_alone && !created {
        return Err(Fault::internal(format!("path: {} exists", path.0)));
    }
    Ok(json!({}))
}

/// Returns the attributes of a file, or of the one that a link points to.
pub(super) async fn metadata(place: &Place, params: PathParams) -> Result<Value, Fault> {
    check(place, &params.path, params.follow_symlinks).await?;
    let own = stat(place, &params.path, false).await?;
    let is_link = own.kind == FileKind::Symlink;
    let found = if is_link {
        stat(place, &params.path, true).await?
    } else {
        own
    };
    Ok(json!({
        "isDirectory": found.kind == FileKind::Directory, "isFile": found.kind == FileKind::File, "isSymlink": is_link,
        "size": found.size, "createdAtMs": found.created_at.map_or(0, |at| at.0), "modifiedAtMs": found.modified_at.0,
    }))
}

/// Returns the path of a file without symbolic links.
pub(super) async fn canonicalize(place: &Place, params: PathParams) -> Result<Value, Fault> {
    let path = resolve(place, &params.path).await?;
    Ok(json!({"path": uri_of(&path.0)}))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RemoveParams {
    path: FilePath,
    #[serde(default)]
    recursive: Option<bool>,
    #[serde(default)]
    force: Option<bool>,
    #[serde(default)]
    follow_symlinks: Option<bool>,
}

/// Removes a file or a directory; a link itself, and not what it points to.
pub(super) async fn remove(place: &Place, params: RemoveParams) -> Result<Value, Fault> {
    check(place, &params.path, params.follow_symlinks).await?;
    let remove = FileRemoveParams {
        recursive: params.recursive.unwrap_or(true),
        missing_ok: params.force.unwrap_or(true),
        ..FileRemoveParams::new(place.open().await?, vec![params.path.0])
    };
    let removed = place.target.forward::<FileRemove>(&remove).await;
    removed.map_err(|error| Fault::of_file(&error))?;
    Ok(json!({}))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CopyParams {
    source_path: FilePath,
    destination_path: FilePath,
    recursive: bool,
}

/// Copies a file, a link, or with `recursive` a directory.
pub(super) async fn copy(place: &Place, params: CopyParams) -> Result<Value, Fault> {
    let (source, destination) = (params.source_path, params.destination_path);
    let kind = stat(place, &source, false).await?.kind;
    let is_inside = destination.0 == source.0 || {
        let rest = destination.0.strip_prefix(source.0.trim_end_matches('/'));
        rest.is_some_and(|rest| rest.starts_with('/'))
    };
    let rule = match kind {
        FileKind::Directory if !params.recursive => "sourcePath: a directory; set recursive",
        FileKind::Directory if is_inside => "destinationPath: inside sourcePath; choose another",
        FileKind::Other => "sourcePath: neither a regular file nor a directory nor a symbolic link",
        _ => "",
    };
    if !rule.is_empty() {
        return Err(Fault::invalid_request(rule));
    }
    let copy = FileMoveParams {
        keep_source: true,
        overwrite: true,
        ..FileMoveParams::new(place.open().await?, source.0, destination.0)
    };
    let copied = place.target.forward::<FileMove>(&copy).await;
    copied.map_err(|error| Fault::of_file(&error))?;
    Ok(json!({}))
}
