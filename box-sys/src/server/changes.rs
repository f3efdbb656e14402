//! Comparisons of a box's files: a process for each, which lists, applies or discards changes.
//!
//! As with snapshots, a child does the work and replies to the client. It ends when the client
//! gives up. A child that applies changes ends only between two files, also if the server ends
//! before it, so that it leaves no temporary file behind.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Signal;

use super::Server;
use super::launch::reopen;
use super::snapshots::has_given_up;
use crate::changes::{self, Comparison, Host, LayerSource, Part, Selection, Times, Views};
use crate::child::close_all_but;
use crate::error::{At, Error, Result};
use crate::mounts::{clone_tree, open_beneath};
use crate::plan::{LayerKind, Mount, Source};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY, Forked};
use crate::snapshot::VersionTimes;
use crate::wire::{ChangesTask, Reply, send_message};

/// What a child works on.
struct Work {
    comparison: Comparison,
    selection: Selection,
    task: ChangesTask,
    /// The layers of the comparison, below the compared directory.
    parts: Vec<Part>,
    /// The workspace, if it is below the compared directory.
    workspace: Option<OwnedFd>,
    /// The writable directory of the host, or the workspace as the guest sees it.
    target: Option<OwnedFd>,
    is_root: bool,
}

impl Server {
    /// Starts a comparison. The child replies.
    pub(super) fn start_changes(
        &mut self,
        comparison: Comparison,
        selection: Selection,
        task: ChangesTask,
        fds: &[OwnedFd],
        reply: &OwnedFd,
    ) -> Result<()> {
        comparison.validate()?;
        selection.validate()?;
        let is_root = self.template.privileged;
        let mut fds = fds.iter();
        let mut next = || {
            let missing = || Error::Protocol("a comparison without its descriptors".into());
            fds.next().ok_or_else(missing)
        };
        let (mut parts, mut target, mut disks) = (Vec::new(), None, Vec::new());
        let mut workspace = None;
        // Layers below something that is not a directory are hidden.
        let (mut hides_new, mut hides_old) = (false, false);
        for layer in &comparison.layers {
            let root = match &layer.source {
                LayerSource::Private => raw::duplicate(next()?.as_fd()).at("duplicate")?,
                LayerSource::Image(path) => self.open_layer(path, None)?,
                LayerSource::Layer(layer) => {
                    if layer.kind == LayerKind::Disk {
                        disks.push(layer.path.clone());
                    }
                    self.open_layer(&layer.path, Some(layer.kind))?
                }
                LayerSource::Workspace | LayerSource::WorkspaceAt(_) => {
                    let source = next()?;
                    let (read, written) =
                        self.in_host_mounts(|server| server.workspace(source, &task))?;
                    if matches!(layer.source, LayerSource::WorkspaceAt(_)) {
                        workspace = Some(read);
                        continue;
                    }
                    target = written;
                    parts.push(Part {
                        directory: read,
                        in_new: layer.in_new,
                        in_old: layer.in_old,
                        is_copy: false,
                    });
                    continue;
                }
            };
            let (in_new, in_old) = (layer.in_new && !hides_new, layer.in_old && !hides_old);
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            let path = Some(&*comparison.directory).filter(|path| !path.as_os_str().is_empty());
            match open_beneath(&root, path.unwrap_or(Path::new(".")), flags) {
                Ok(directory) => parts.push(Part {
                    directory,
                    in_new,
                    in_old,
                    is_copy: layer.source.is_copy(),
                }),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
                Err(_) => {
                    hides_new |= in_new;
                    hides_old |= in_old;
                }
            }
        }
        parts.retain(|part| part.in_new || part.in_old);
        if let ChangesTask::Discard { device, .. } = &task {
            let namespace = next()?;
            target = Some(self.inside(namespace.as_fd(), &comparison.directory, *device)?);
        }
        let work = Work {
            comparison,
            selection,
            task,
            parts,
            workspace,
            target,
            is_root,
        };
        // SAFETY: this process has a single thread.
        match unsafe { raw::fork_into(0, None) }.at("fork the comparison")? {
            Forked::Parent(..) => {
                // The child has its own descriptors.
                self.drop_unused(&disks);
                Ok(())
            }
            Forked::Child => {
                let answer = run(&work, reply).unwrap_or_else(|error| Reply::from_error(&error));
                let _ = send_message(reply.as_fd(), &answer, &[]);
                raw::exit_now(0)
            }
        }
    }

    fn open_layer(&mut self, path: &Path, kind: Option<LayerKind>) -> Result<OwnedFd> {
        self.in_host_mounts(|server| {
            let privileged = server.template.privileged;
            let (layers, pools) = (&mut server.layers, &mut server.pools);
            Ok(layers.open_one(path, kind, privileged, pools)?.0)
        })
    }

    /// Mounts the directory of a workspace: read-only, and writable for an apply.
    ///
    /// An apply compares without mapped owners, which it does not compare.
    fn workspace(
        &mut self,
        source: &OwnedFd,
        task: &ChangesTask,
    ) -> Result<(OwnedFd, Option<OwnedFd>)> {
        let (guest, writes) = match task {
            ChangesTask::Discard { guest, .. } => (Some(*guest), false),
            ChangesTask::List { .. } => (None, false),
            ChangesTask::Apply { .. } => (None, true),
        };
        let recursive = !self.template.privileged;
        let place = reopen(source.as_fd()).at("reopen the workspace")?;
        let clone = |attr| {
            let tree = clone_tree(&place, "", recursive).at("clone the workspace's mount")?;
            raw::mount_setattr(tree.as_fd(), recursive, ATTR_NOSUID | ATTR_NODEV | attr, 0)
                .at("restrict the workspace's mount")?;
            Ok(tree)
        };
        if writes {
            return Ok((clone(ATTR_RDONLY)?, Some(clone(0)?)));
        }
        let Some(guest) = guest else {
            return Ok((clone(ATTR_RDONLY)?, None));
        };
        let mount = Mount {
            source: Source::Fd(0),
            target: "/".into(),
            writable: true,
            overlay: true,
        };
        let source = raw::duplicate(source.as_fd()).at("duplicate")?;
        Ok((self.tree(&mount, guest, &[source])?, None))
    }

    /// Opens the workspace of a box as its guest sees it.
    ///
    /// The guest may have moved other mounts to this path, so the device must be the known one.
    fn inside(&self, namespace: BorrowedFd<'_>, path: &Path, device: u64) -> Result<OwnedFd> {
        let open = || {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open("/", flags, Mode::empty())?;
            open_beneath(&root, path, OFlags::PATH | OFlags::DIRECTORY)
        };
        raw::setns(namespace, libc::CLONE_NEWNS).at("enter the box's mount namespace")?;
        let opened = open();
        self.return_to_template();
        let opened = opened.at("open the workspace of the box")?;
        let stat = rustix::fs::fstat(&opened).at("read the workspace's metadata")?;
        if stat.st_dev != device {
            return Err(Errno::STALE).at("open the workspace of the box");
        }
        Ok(opened)
    }
}

fn run(work: &Work, reply: &OwnedFd) -> Result<Reply> {
    let _ = rustix::thread::set_name(c"box-changes");
    if !matches!(work.task, ChangesTask::Apply { .. }) {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .at("set the parent death signal")?;
    }
    let parts = work.parts.iter().map(|part| &part.directory);
    let keep = parts.chain(&work.workspace).chain(&work.target);
    let keep = keep.chain([reply]);
    close_all_but(keep.map(AsRawFd::as_raw_fd).collect())?;
    let is_cancelled = || has_given_up(reply);
    let times = match &work.task {
        ChangesTask::Apply { fallback_time, .. } => Some(Times {
            made: VersionTimes::new(work.is_root),
            fallback: *fallback_time,
        }),
        ChangesTask::List { .. } | ChangesTask::Discard { .. } => None,
    };
    let views = || {
        let mut parts = Vec::with_capacity(work.parts.len());
        for part in &work.parts {
            parts.push(Part {
                directory: raw::duplicate(part.directory.as_fd()).at("duplicate")?,
                ..*part
            });
        }
        Ok(Views {
            comparison: &work.comparison,
            selection: &work.selection,
            parts,
            workspace: work.comparison.workspace_at().zip(work.workspace.as_ref()),
            opaque: if work.is_root {
                "trusted.overlay.opaque"
            } else {
                "user.overlay.opaque"
            },
            times,
            is_cancelled: &is_cancelled,
        })
    };
    let target = || {
        let missing = || Error::Protocol("a comparison without a directory to write to".into());
        let target = work.target.as_ref().ok_or_else(missing)?;
        raw::duplicate(target.as_fd()).at("duplicate")
    };
    // A later page may begin after a path is gone.
    if !matches!(work.task, ChangesTask::List { after: Some(_), .. })
        && let Some(path) = views()?.missing()
    {
        return Err(Error::Missing(path.to_string_lossy().into_owned()));
    }
    match &work.task {
        ChangesTask::List { after, limit } => {
            changes::list(views()?, after.as_deref(), *limit).map(Reply::Changes)
        }
        ChangesTask::Apply { options, .. } => {
            if work.is_root {
                rustix::thread::set_thread_groups(&[]).at("drop supplementary groups")?;
            }
            let own_writes = options.own_writes.clone();
            let host = Host::new(target()?, work.is_root, &options.temporary, own_writes);
            let mut host = host.at("open the directory of the host")?;
            changes::apply(&views, &mut host, options, &is_cancelled).map(Reply::Applied)
        }
        ChangesTask::Discard { temporary, .. } => {
            let mut parts = work.parts.iter();
            let upper = parts.find(|part| part.in_new && !part.in_old && !part.is_copy);
            let upper = upper.map(|part| &part.directory);
            let discarded = changes::discard(views()?, &target()?, upper, work.is_root, temporary)?;
            Ok(Reply::Discarded(discarded))
        }
    }
}
