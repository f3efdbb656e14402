//! Lists, applies and discards the changes of a box.
//!
//! A process of the fork server does the work (`box_sys::changes`). It has the rights over the
//! private files, and the runtime has not. Work on a workspace is one at a time for each box.
//!
//! If the caller stops waiting, the work ends soon, between two files. A thread waits for that.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    BoxApplyParams, BoxApplyResult, DiffEntry, DiffKind, FileKind, SkippedChange,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxSpec, Code, DEFAULT_HOME, HostPathMode};
use box_sys::{
    Applied, ApplyOptions, ChangeKind, ChangedType, ChangesOf, ComparedLayer, Comparison,
    LayerSource, PendingChanges, Selection,
};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use super::error::{box_gone, sandbox_error};
use super::freeze::Frozen;
use super::live_box::LiveBox;
use super::{NativeBackend, plan, readable};
use crate::backend::{ChangeList, ChangesRequest, DiffBase, Layer};

/// Paths that an error names.
const NAMED_PATHS: usize = 3;

/// Directories of a host root that Box attaches or creates, and that no guest can change.
const HOST_ROOT: &[&str] = &[
    "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "run/box",
    "var/tmp",
];

/// The same on an image.
const IMAGE_ROOT: &[&str] = &["dev", "proc", "etc/resolv.conf"];

/// Work in progress, which ends before another one begins.
struct Unfinished<T: 'static> {
    work: Option<PendingChanges<T>>,
    turn: Option<OwnedMutexGuard<()>>,
}

impl<T: 'static> Drop for Unfinished<T> {
    fn drop(&mut self) {
        let (work, turn) = (self.work.take(), self.turn.take());
        if let Some(work) = work {
            // The work ends soon, but not at once.
            std::thread::spawn(move || {
                work.cancel();
                drop(turn);
            });
        }
    }
}

impl<T: 'static> Unfinished<T> {
    async fn finish(mut self, time_limit: Duration, selected: Selected) -> Result<T, BoxError> {
        let waiting = async {
            match &self.work {
                Some(work) => readable(work.as_fd()).await,
                None => Err(io::ErrorKind::NotFound.into()),
            }
        };
        let waited = tokio::time::timeout(time_limit, waiting).await;
        let waited = waited.map_err(|_| too_slow(time_limit))?;
        waited.map_err(|error| failed(&error))?;
        let work = self.work.take().ok_or_else(box_gone)?;
        work.finish().map_err(|error| match &error {
            box_sys::Error::Missing(path) => selected.missing(path),
            error => work_error(error),
        })
    }
}

/// How an error names a selected path.
#[derive(Clone, Copy)]
struct Selected {
    field: &'static str,
    /// Precedes a path.
    root: &'static str,
    /// The view that the box is compared with.
    old: &'static str,
}

impl Selected {
    const OF_WORKSPACE: Self = Self {
        field: "paths",
        root: "",
        old: "the directory",
    };

    fn of_list(base: DiffBase<'_>) -> Self {
        let (root, old) = match base {
            DiffBase::Workspace => ("", "the directory"),
            DiffBase::Image => ("/", "its image"),
            DiffBase::Snapshot(_) => ("/", "the checkpoint"),
        };
        Self {
            field: "path",
            root,
            old,
        }
    }

    fn missing(&self, path: &str) -> BoxError {
        let Self { field, root, old } = self;
        let path = format!("{root}{path}");
        let message = format!("{field}: {path:?} is neither in the box nor in {old}");
        BoxError::not_found(message).with_detail(&Detail::of_field(field).of(Subject::File))
    }
}

impl NativeBackend {
    /// Lists changes; see [`Backend::diff`](crate::Backend::diff).
    pub(super) async fn list_changes(
        &self,
        id: Option<Uuid>,
        request: ChangesRequest<'_>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ChangeList, BoxError> {
        let live_box = self.live(id)?;
        let server = self.0.server.running().await?;
        let workspace = match request.base {
            DiffBase::Workspace => Some(workspace(&request)?),
            // A rollback restores the changes of a workspace, too.
            DiffBase::Snapshot(_) if is_overlay(request.spec) => Some(workspace(&request)?),
            DiffBase::Image | DiffBase::Snapshot(_) => None,
        };
        let comparison = self.comparison(&request, live_box.is_some());
        let selection = selection(&request);
        let of = ChangesOf {
            comparison: &comparison,
            selection: &selection,
            sandbox: live_box.as_deref().map(|live_box| &live_box.sandbox),
            workspace: workspace.as_ref().map(|workspace| workspace.as_fd()),
        };
        let work = server.start_list(of, after, limit);
        let unfinished = Unfinished {
            work: Some(work.map_err(|error| work_error(&error))?),
            turn: None,
        };
        let selected = Selected::of_list(request.base);
        let root = selected.root;
        let page = unfinished.finish(request.time_limit, selected).await?;
        let changes = page.changes.into_iter().map(|change| DiffEntry {
            path: format!("{root}{}", change.path),
            change: match change.kind {
                ChangeKind::Added => DiffKind::Added,
                ChangeKind::Changed => DiffKind::Changed,
                ChangeKind::Deleted => DiffKind::Deleted,
            },
            kind: match change.file_type {
                ChangedType::File => FileKind::File,
                ChangedType::Directory => FileKind::Directory,
                ChangedType::Link => FileKind::Symlink,
                ChangedType::Other => FileKind::Other,
            },
            size: change.size,
        });
        Ok(ChangeList::new(changes.collect(), page.next))
    }

    /// Applies changes; see [`Backend::apply`](crate::Backend::apply).
    pub(super) async fn apply_changes(
        &self,
        id: Option<Uuid>,
        request: ChangesRequest<'_>,
        params: &BoxApplyParams,
    ) -> Result<BoxApplyResult, BoxError> {
        let live_box = self.live(id)?;
        let server = self.0.server.running().await?;
        let turn = match &live_box {
            Some(live_box) => Arc::clone(&live_box.workspace_turn),
            None => Arc::clone(&self.0.stopped_turn),
        };
        let turn = turn.lock_owned().await;
        let source = workspace(&request)?;
        let comparison = self.comparison(&request, live_box.is_some());
        let selection = selection(&request);
        let frozen = match &live_box {
            Some(live_box) => frozen(live_box, request.is_stopped).await?,
            None => None,
        };
        let options = ApplyOptions {
            force: params.force,
            dry_run: params.dry_run,
            temporary: temporary_name(id.unwrap_or_default()),
            own_writes: request.applies.to_vec(),
        };
        let created_at = i64::try_from(request.created_at.0).unwrap_or(i64::MAX);
        let created_at = created_at.saturating_mul(1_000_000);
        let of = ChangesOf {
            comparison: &comparison,
            selection: &selection,
            sandbox: live_box.as_deref().map(|live_box| &live_box.sandbox),
            workspace: Some(source.as_fd()),
        };
        let work = server.start_apply(of, &options, created_at);
        let unfinished = Unfinished {
            work: Some(work.map_err(|error| work_error(&error))?),
            turn: Some(turn),
        };
        let finishing = unfinished.finish(request.time_limit, Selected::OF_WORKSPACE);
        let applied = finishing.await;
        drop(frozen);
        let applied = applied?;
        if !params.dry_run {
            check_applied(&applied)?;
        }
        let skipped = applied.skipped.first.into_iter();
        Ok(BoxApplyResult {
            added: applied.added,
            changed: applied.changed,
            deleted: applied.deleted,
            skipped: skipped
                .map(|(path, why)| SkippedChange { path, why })
                .collect(),
            conflicts: applied
                .conflicts
                .first
                .into_iter()
                .map(|(path, _)| path)
                .collect(),
        })
    }

    /// Discards changes; see [`Backend::discard`](crate::Backend::discard).
    pub(super) async fn discard_changes(
        &self,
        id: Uuid,
        request: ChangesRequest<'_>,
    ) -> Result<u64, BoxError> {
        let live_box = self.live_box(id).ok_or_else(box_gone)?;
        let server = self.0.server.running().await?;
        let turn = Arc::clone(&live_box.workspace_turn).lock_owned().await;
        let source = workspace(&request)?;
        let (comparison, selection) = (self.comparison(&request, true), selection(&request));
        // On a machine that cannot freeze boxes, the guest may see some of the steps.
        let frozen = match live_box.hold().await {
            Err(error) if error.code() == Code::Unsupported => None,
            frozen => Some(frozen?),
        };
        let of = ChangesOf {
            comparison: &comparison,
            selection: &selection,
            sandbox: Some(&live_box.sandbox),
            workspace: Some(source.as_fd()),
        };
        let work = server.start_discard(of, &temporary_name(id));
        let unfinished = Unfinished {
            work: Some(work.map_err(|error| work_error(&error))?),
            turn: Some(turn),
        };
        let finishing = unfinished.finish(request.time_limit, Selected::OF_WORKSPACE);
        let discarded = finishing.await;
        drop(frozen);
        discarded
    }

    /// Returns the box, unless layers are all that is left of it.
    fn live(&self, id: Option<Uuid>) -> Result<Option<Arc<LiveBox>>, BoxError> {
        id.map(|id| self.live_box(id).ok_or_else(box_gone))
            .transpose()
    }

    /// The two views that a request compares.
    fn comparison(&self, request: &ChangesRequest<'_>, is_live: bool) -> Comparison {
        let layer = |source, in_new, in_old| ComparedLayer {
            source,
            in_new,
            in_old,
        };
        let live = is_live.then(|| layer(LayerSource::Private, true, false));
        let mut layers: Vec<ComparedLayer> = live.into_iter().collect();
        let workspace = relative(Path::new(&request.spec.mount_path));
        if request.base == DiffBase::Workspace {
            let own = planned(request.layers).into_iter();
            layers.extend(own.map(|own| layer(own, true, false)));
            layers.push(layer(LayerSource::Workspace, true, true));
            let below = |point: &PathBuf| {
                let inner = relative(point).strip_prefix(&workspace).ok()?.to_owned();
                (!inner.as_os_str().is_empty()).then_some(inner)
            };
            return Comparison {
                layers,
                directory: workspace.clone(),
                hidden: request.mount_points.iter().filter_map(below).collect(),
                made: Vec::new(),
                // An apply never writes them.
                special_modes: false,
            };
        }
        let earlier: &[Layer] = match request.base {
            DiffBase::Snapshot(layers) => layers,
            DiffBase::Image | DiffBase::Workspace => &[],
        };
        let both = request.layers.iter().rev().zip(earlier.iter().rev());
        let shared = both.take_while(|(own, earlier)| own == earlier).count();
        let own = request.layers.len() - shared;
        let (own, rest) = request.layers.split_at(own);
        let earlier = earlier.get(..earlier.len() - shared).unwrap_or_default();
        for (part, in_new, in_old) in [
            (own, true, false),
            (earlier, false, true),
            (rest, true, true),
        ] {
            let part = planned(part).into_iter();
            layers.extend(part.map(|source| layer(source, in_new, in_old)));
        }
        let configured = request.spec.image.as_ref();
        let configured = configured.and_then(|image| self.0.config.images.get(image));
        let image = request.image.or(configured);
        let source = image.map(|image| LayerSource::Image(image.path.clone()));
        layers.extend(source.map(|source| layer(source, true, true)));
        let fixed = if image.is_some() {
            IMAGE_ROOT
        } else {
            HOST_ROOT
        };
        let mut hidden: Vec<PathBuf> = fixed.iter().map(PathBuf::from).collect();
        hidden.extend(request.mount_points.iter().map(|point| relative(point)));
        if matches!(request.base, DiffBase::Snapshot(_)) && is_overlay(request.spec) {
            layers.push(layer(LayerSource::WorkspaceAt(workspace), true, true));
        } else if request.spec.mounts_host_path() {
            hidden.push(workspace);
        }
        Comparison {
            layers,
            directory: PathBuf::new(),
            made: made(request, &hidden),
            hidden,
            special_modes: true,
        }
    }
}

/// The sources of layers.
fn planned(layers: &[Layer]) -> Vec<LayerSource> {
    let layers = plan::layers(layers).into_iter();
    layers.map(LayerSource::Layer).collect()
}

/// The directories that Box creates in a root, with their parents.
fn made(request: &ChangesRequest<'_>, hidden: &[PathBuf]) -> Vec<PathBuf> {
    let spec = request.spec;
    let home = spec
        .guest
        .as_ref()
        .map_or(DEFAULT_HOME, |guest| &guest.home);
    let always = [
        "/tmp",
        "/var/tmp",
        "/opt",
        box_protocol::DEFAULT_MOUNT_PATH,
        home,
    ];
    let asked = spec.dirs.iter().flatten().map(String::as_str);
    let all = always.into_iter().chain(asked).map(Path::new).map(relative);
    let mut made: Vec<PathBuf> = Vec::new();
    for path in all
        .chain([relative(Path::new(&spec.mount_path))])
        .chain(hidden.iter().cloned())
    {
        made.extend(path.ancestors().map(Path::to_owned));
    }
    made.retain(|path| !path.as_os_str().is_empty());
    made.sort();
    made.dedup();
    made
}

fn relative(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

fn selection(request: &ChangesRequest<'_>) -> Selection {
    Selection {
        paths: request.paths.to_vec(),
    }
}

/// Device and inode of a directory, which identify it.
pub(super) fn identity(directory: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Whether the changes of the workspace are private files.
fn is_overlay(spec: &BoxSpec) -> bool {
    spec.host_path.is_some() && spec.host_path_mode == HostPathMode::Overlay
}

/// Opens the host directory of a workspace, and checks that it is the one of the last start.
fn workspace(request: &ChangesRequest<'_>) -> Result<OwnedFd, BoxError> {
    let spec = request.spec;
    let path = spec
        .host_path
        .as_deref()
        .filter(|_| spec.host_path_mode == HostPathMode::Overlay);
    let (Some(path), Some(known)) = (path, request.directory) else {
        return Err(BoxError::unsupported(
            "host_path_mode: the workspace is not an overlay; create the box with host_path_mode overlay",
        )
        .with_detail(&Detail::of_field("host_path_mode")));
    };
    let source = plan::open("host_path", path)?;
    if identity(&source).map_err(|error| failed(&error))? != known {
        return Err(BoxError::conflict(
            "host_path: another directory has this path now; move the first one back",
        )
        .with_detail(&Detail::of_field("host_path")));
    }
    Ok(source)
}

/// Freezes a box. `is_stopped` says that no process would run.
pub(super) async fn frozen(
    live_box: &Arc<LiveBox>,
    is_stopped: bool,
) -> Result<Option<Frozen>, BoxError> {
    match live_box.hold().await {
        Err(error) if is_stopped && error.code() == Code::Unsupported => Ok(None),
        Err(error) if error.code() == Code::Unsupported => {
            let message = format!("{}; stop the box first", error.message());
            Err(BoxError::unsupported(message))
        }
        frozen => frozen.map(Some),
    }
}

/// Name of temporary files in the host directory.
fn temporary_name(id: Uuid) -> String {
    format!(".box-{}.tmp", id.simple())
}

/// Converts an outcome that is not complete to an error.
fn check_applied(applied: &Applied) -> Result<(), BoxError> {
    let done = applied.added + applied.changed + applied.deleted;
    if applied.conflicts.count > 0 {
        let mut names = Vec::new();
        for (path, _) in applied.conflicts.first.iter().take(NAMED_PATHS) {
            names.push(format!("{path:?}"));
        }
        let more = applied.conflicts.count - names.len() as u64;
        let more = match more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let message = format!(
            "force: also changed on the host: {}{more}; set force to replace them, or select other paths",
            names.join(", ")
        );
        return Err(BoxError::conflict(message).with_detail(&Detail::of_field("force")));
    }
    let Some((path, errno)) = &applied.failed else {
        return Ok(());
    };
    let error = io::Error::from_raw_os_error(*errno);
    let message = format!(
        "{path:?}: {}; {done} changes are applied, repeat the call for the rest",
        error.kind()
    );
    let detail = Detail::of_field("host_path");
    Err(match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            BoxError::denied(message).with_detail(&detail)
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            BoxError::capacity(message).with_detail(&Detail::about(Subject::Disk))
        }
        _ => BoxError::unavailable(message),
    })
}

fn too_slow(limit: Duration) -> BoxError {
    let seconds = limit.as_secs_f64();
    BoxError::timeout(format!(
        "the files were not read within {seconds:.1} s; select fewer paths"
    ))
}

/// Converts the error of the process that did the work.
fn work_error(error: &box_sys::Error) -> BoxError {
    match error {
        box_sys::Error::Step { source, .. } => failed(source),
        box_sys::Error::Invalid(why) => BoxError::validation(why.clone()),
        error => sandbox_error(error),
    }
}

/// Converts a failure of the file system.
fn failed(error: &io::Error) -> BoxError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            BoxError::capacity("the disk of the box has no room; remove files")
                .with_detail(&Detail::about(Subject::Disk))
        }
        io::ErrorKind::StaleNetworkFileHandle => {
            BoxError::conflict("files changed during the call; repeat it")
        }
        kind => BoxError::unavailable(format!("the files of the box cannot be compared: {kind}")),
    }
}
