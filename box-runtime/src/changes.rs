//! `box.diff`, `box.apply` and `box.discard`: what a box has changed.
//!
//! The backend compares the files. The calls do not enter the box, do not wake it and do not count
//! as activity.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use box_protocol::actions::{
    BoxApply, BoxApplyParams, BoxApplyResult, BoxDiff, BoxDiffParams, BoxDiffResult, BoxDiscard,
    BoxDiscardParams, BoxDiscardResult, MAX_CHANGE_PATHS, MAX_CHANGES, SINCE_IMAGE,
    SINCE_WORKSPACE,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code, HostPathMode, Invalid};
use box_rpc::{Call, Caller, Handle, Peer};
use uuid::Uuid;

use crate::backend::{Backend, ChangesRequest, DiffBase, ImageRoot, Layer};
use crate::box_actor::entry::BoxEntry;
use crate::caller::Visibility as _;
use crate::handlers::plain;
use crate::images::HeldImage;
use crate::layers::LayerUse;
use crate::runtime::BoxRuntime;
use crate::snapshots::{Source, source};

/// Maximum time to compare the files for one page.
const DIFF_LIMIT: Duration = Duration::from_mins(2);

/// Maximum time of an apply or a discard, during which the box is paused.
const WRITE_LIMIT: Duration = Duration::from_mins(30);

/// Longest position of a page.
const POSITION_BYTES: usize = 16 << 10;

/// Most applies that a box remembers.
const APPLIES: usize = 32;

/// How far the clock of a file system can be behind.
const CLOCK_LAG: Duration = Duration::from_millis(20);

/// Longest path of a selection.
const PATH_BYTES: usize = 4096;

/// What the changes of a box are compared with, and where its files are.
struct Target {
    entry: Arc<BoxEntry>,
    backend: Arc<dyn Backend>,
    /// The id of the box, unless layers are all that is left of it.
    id: Option<Uuid>,
    peer: Option<Peer>,
    is_stopped: bool,
    /// Layers below the live files, which stay while this exists.
    _uses: Vec<LayerUse>,
    layers: Vec<Layer>,
    /// The image of the box, which stays while this exists.
    image: Option<HeldImage>,
    mount_points: Vec<PathBuf>,
    applies: Vec<(i64, i64)>,
}

impl Target {
    fn request<'a>(
        &'a self,
        base: DiffBase<'a>,
        paths: &'a [PathBuf],
        time_limit: Duration,
    ) -> ChangesRequest<'a> {
        let status = self.entry.status();
        let mut request = ChangesRequest::new(&self.entry.spec, base, time_limit);
        request.image = self.image.as_ref().map(HeldImage::root);
        request.mount_points = &self.mount_points;
        request.layers = &self.layers;
        request.paths = paths;
        request.is_stopped = self.is_stopped;
        request.created_at = status.created_at;
        request.directory = status.facts.workspace;
        request.applies = &self.applies;
        request
    }
}

impl Target {
    /// Stores when an apply has written to the directory of the workspace.
    ///
    /// Otherwise a later apply would take its files for changes of a user. A failed apply is not
    /// stored, because a user may have changed files at that time: a conflict is better than a loss.
    async fn remember_apply(&self, times: (i64, i64)) {
        {
            let mut status = self.entry.status();
            let applies = &mut status.files.applies;
            applies.push(times);
            let surplus = applies.len().saturating_sub(APPLIES);
            applies.drain(..surplus);
        }
        self.entry.mark_changed();
        // The writer logs a failure.
        let _ = self.entry.wait_persisted().await;
    }

    /// The layers of a checkpoint of the box, which stay while the result exists.
    fn checkpoint(&self, name: &str) -> Option<Vec<LayerUse>> {
        let status = self.entry.status();
        let kept = &status.files.checkpoints;
        let kept = kept.iter().find(|kept| kept.info.name.as_str() == name)?;
        Some(kept.layers.clone())
    }
}

impl BoxRuntime {
    /// Lists what a box has changed.
    pub async fn diff(
        &self,
        caller: &Caller,
        params: BoxDiffParams,
    ) -> Result<BoxDiffResult, BoxError> {
        let limit = match params.limit {
            None => MAX_CHANGES,
            Some(limit) if (1..=MAX_CHANGES).contains(&limit) => limit,
            Some(limit) => {
                let rule = format!("must be between 1 and {MAX_CHANGES}, not {limit}");
                return Err(Invalid::new("limit", rule).into());
            }
        };
        if params
            .after
            .as_ref()
            .is_some_and(|after| after.len() > POSITION_BYTES)
        {
            return Err(Invalid::new(
                "after",
                "must be the `next` of an earlier result; omit it to begin",
            )
            .into());
        }
        let target = self.changes_of(caller, &params.box_id).await?;
        let spec = &target.entry.spec;
        let is_overlay = spec.host_path_mode == HostPathMode::Overlay && spec.host_path.is_some();
        let since = match &params.since {
            Some(since) => since.as_str(),
            None if is_overlay => SINCE_WORKSPACE,
            None => SINCE_IMAGE,
        };
        let checkpoint = target.checkpoint(since);
        let earlier: Option<Vec<Layer>> = checkpoint
            .as_ref()
            .map(|layers| layers.iter().map(LayerUse::layer).collect());
        let base = match (since, &earlier) {
            (SINCE_WORKSPACE, _) => DiffBase::Workspace,
            (SINCE_IMAGE, _) => DiffBase::Image,
            (_, Some(layers)) => DiffBase::Snapshot(layers),
            (name, None) => return Err(no_checkpoint(name)),
        };
        let root = match base {
            DiffBase::Workspace => &spec.mount_path,
            _ => "/",
        };
        let path = params.path.as_deref().map(|path| below(root, "path", path));
        let paths: Vec<PathBuf> = path.transpose()?.into_iter().collect();
        let request = target.request(base, &paths, DIFF_LIMIT);
        let after = params.after.as_deref();
        let found = target
            .backend
            .diff(target.id, request, after, limit as usize);
        let found = found.await?;
        Ok(BoxDiffResult {
            changes: found.changes,
            since: since.to_owned(),
            next: found.next,
        })
    }

    /// Writes the changes of a workspace to its host directory.
    pub async fn apply(
        &self,
        caller: &Caller,
        params: BoxApplyParams,
    ) -> Result<BoxApplyResult, BoxError> {
        // The directory belongs to the owner of the box.
        caller.check_may_own()?;
        let target = self.changes_of(caller, &params.box_id).await?;
        let paths = selected(&target.entry, &params.paths)?;
        let request = target.request(DiffBase::Workspace, &paths, WRITE_LIMIT);
        let silent = target.entry.expect_silence(target.peer.clone());
        let begun = nanos(SystemTime::now() - CLOCK_LAG);
        let applied = target.backend.apply(target.id, request, &params).await;
        drop(silent);
        if !params.dry_run && applied.is_ok() {
            let ended = nanos(SystemTime::now());
            target.remember_apply((begun, ended)).await;
            // What a user changes after the response has a later time than the apply.
            tokio::time::sleep(CLOCK_LAG).await;
        }
        if !params.dry_run {
            let result = applied.as_ref();
            tracing::info!(
                target: "box_runtime::audit",
                caller = &*caller.name(),
                box_id = %target.entry.spec.box_id,
                action = "box.apply",
                added = result.map_or(0, |result| result.added),
                changed = result.map_or(0, |result| result.changed),
                deleted = result.map_or(0, |result| result.deleted),
                code = result.err().map(|error| error.code().as_str()),
                "workspace"
            );
        }
        applied
    }

    /// Restores the files of a workspace from its host directory.
    pub async fn discard(
        &self,
        caller: &Caller,
        params: BoxDiscardParams,
    ) -> Result<BoxDiscardResult, BoxError> {
        let target = self.changes_of(caller, &params.box_id).await?;
        let paths = selected(&target.entry, &params.paths)?;
        let request = target.request(DiffBase::Workspace, &paths, WRITE_LIMIT);
        let Some(id) = target.id else {
            let problem = "the box is stopped; start it first";
            return Err(BoxError::conflict(problem).with_detail(&Detail::about(Subject::Box)));
        };
        let silent = target.entry.expect_silence(target.peer.clone());
        let discarded = target.backend.discard(id, request).await;
        drop(silent);
        let discarded = discarded?;
        Ok(BoxDiscardResult { discarded })
    }

    /// Finds the files of a box.
    async fn changes_of(
        &self,
        caller: &Caller,
        box_id: &box_protocol::BoxId,
    ) -> Result<Target, BoxError> {
        let entry = self.entry(caller, box_id).await?;
        let (backend, id, peer, is_stopped, uses) = match source(&entry).await? {
            Source::Live {
                location,
                peer,
                below,
            } => (location.backend, Some(location.id), peer, false, below),
            Source::Layers(layers) => {
                let choice = self.shared().selector.choose().await;
                (Arc::clone(choice.backend()?), None, None, true, layers)
            }
        };
        let (mounts, digest, rootfs, applies) = {
            let status = entry.status();
            let mounts = status.mounts.requested.iter().chain(&status.mounts.added);
            let mounts: Vec<PathBuf> = mounts.map(|mount| (&mount.mount_path).into()).collect();
            let facts = &status.facts;
            let applies = status.files.applies.clone();
            let digest = facts.image_resolved.clone();
            (mounts, digest, facts.rootfs.clone(), applies)
        };
        let image = match rootfs.as_deref() {
            Some("image") => {
                let images = &self.shared().images;
                images.hold_root(&entry.spec, digest.as_deref()).await?
            }
            _ => None,
        };
        let spec = &entry.spec;
        let extra = spec.extra_mounts.iter().map(|mount| &mount.mount_path);
        let volumes = spec.volumes.iter().map(|mount| &mount.mount_path);
        let mut mount_points = mounts;
        mount_points.extend(extra.chain(volumes).map(PathBuf::from));
        mount_points.sort();
        mount_points.dedup();
        Ok(Target {
            entry,
            backend,
            id,
            peer,
            is_stopped,
            layers: uses.iter().map(LayerUse::layer).collect(),
            _uses: uses,
            image,
            mount_points,
            applies,
        })
    }
}

/// The selected paths of a workspace, relative to it.
fn selected(entry: &BoxEntry, paths: &[String]) -> Result<Vec<PathBuf>, BoxError> {
    if paths.len() > MAX_CHANGE_PATHS {
        let what = "the number of paths";
        return Err(BoxError::limit(
            Code::Validation,
            what,
            "paths",
            MAX_CHANGE_PATHS,
        ));
    }
    let below = |path: &String| below(&entry.spec.mount_path, "paths", path);
    paths.iter().map(below).collect()
}

/// A path relative to a directory of the box, from an absolute or a relative one.
fn below(root: &str, field: &'static str, path: &str) -> Result<PathBuf, BoxError> {
    let invalid = |rule: String| BoxError::from(Invalid::new(field, rule));
    if path.is_empty() || path.len() > PATH_BYTES || path.contains('\0') {
        let rule = format!("must have 1 to {PATH_BYTES} bytes and no NUL");
        return Err(invalid(rule));
    }
    let inner = match path.strip_prefix('/') {
        None => Path::new(path),
        Some(_) => Path::new(path)
            .strip_prefix(root)
            .map_err(|_| invalid(format!("must be below {root}")))?,
    };
    let mut relative = PathBuf::new();
    for component in inner.components() {
        match component {
            Component::Normal(name) => relative.push(name),
            Component::CurDir => {}
            _ => return Err(invalid("must not contain `..`".to_owned())),
        }
    }
    Ok(relative)
}

/// Nanoseconds since 1970.
fn nanos(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(i64::MAX)
}

fn no_checkpoint(name: &str) -> BoxError {
    BoxError::not_found(format!(
        "since: the box has no checkpoint {name}; use image or workspace"
    ))
    .with_detail(&Detail::of_field("since").of(Subject::Box))
}

impl HeldImage {
    fn root(&self) -> &ImageRoot {
        &self.root
    }
}

plain! {
    BoxDiff: diff(BoxDiffParams) -> BoxDiffResult;
    BoxApply: apply(BoxApplyParams) -> BoxApplyResult;
    BoxDiscard: discard(BoxDiscardParams) -> BoxDiscardResult;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_relative_to_the_workspace_and_stay_in_it() {
        for (path, relative) in [
            ("src/main.rs", "src/main.rs"),
            ("./src//x/", "src/x"),
            ("/workspace/src", "src"),
            ("/workspace", ""),
            (".", ""),
            ("..x", "..x"),
            ("a\nb", "a\nb"),
        ] {
            let found = below("/workspace", "paths", path).unwrap();
            assert_eq!(found, Path::new(relative), "{path:?}");
        }
        let long = "x".repeat(PATH_BYTES + 1);
        for (path, rule) in [
            ("../x", "must not contain `..`"),
            ("a/../../x", "must not contain `..`"),
            ("/workspace/../etc", "must not contain `..`"),
            ("/etc", "must be below /workspace"),
            ("/workspace2/x", "must be below /workspace"),
            ("", "must have 1 to 4096 bytes"),
            ("a\0b", "must have 1 to 4096 bytes"),
            (&long, "must have 1 to 4096 bytes"),
        ] {
            let error = below("/workspace", "paths", path).unwrap_err();
            assert_eq!(error.code(), Code::Validation);
            assert!(error.message().contains(rule), "{path:?}: {error:?}");
        }
    }
}
