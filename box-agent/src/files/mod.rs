//! `file.*`: file operations from inside the box, with the guest's rights.
//!
//! # Reading order
//! 1. This file: the calls. Each runs as one or more steps on a thread of the `pool`, which has the guest's rights.
//! 2. `guest_root`: from a path to a descriptor. No operation looks up a path twice and relies on both results.
//! 3. `path`: requested paths; `error`: translation of system errors.
//! 4. `stat` with `xattrs`, `read`, `write` with `temp_file` and `upload`, `replace`, `change` with `copy`: operations on one entry.
//! 5. `guest_info`: facts about the box that its files show.
//! 6. `file_transfer`: the same calls with their data in shared memory instead of messages.
//! 7. `walk`, and the operations built on it: `list`, `grep`, `pack`. `unpack` is the reverse of `pack`.
//! 8. `watch`: changes in a tree.

mod change;
mod copy;
mod error;
mod file_transfer;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod grep;
mod guest_info;
mod guest_root;
mod list;
mod pack;
mod path;
mod pool;
mod read;
mod replace;
mod stat;
mod temp_file;
#[cfg(test)]
mod tests;
mod unpack;
mod upload;
mod walk;
mod watch;
mod write;
mod xattrs;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use box_protocol::BoxError;
use box_protocol::actions::{
    AgentGuest, AgentHealthParams, AgentWatch, FileAttributes, FileFind, FileGrep, FileList,
    FileMkdir, FileMove, FilePack, FilePackParams, FileRead, FileReadParams, FileRemove,
    FileReplace, FileStat, FileStatInfo, FileTreeResult, FileUnpack, FileUnpackParams, FileWrite,
    FileWriteParams, GuestInfo, OrderKey, Ordered, UploadPiece,
};
use box_rpc::{Action, Call, Empty, Handle, Router, Turn, Turns};
use box_sys::{Guest, GuestThread, Init};
use rustix::fs::{Mode, OFlags};

use self::file_transfer::PieceSender;
use self::guest_root::{GuestRoot, Step};
use self::pack::TreePacker;
use self::path::PathBase;
use self::pool::Pool;
use self::read::FileReader;
use self::watch::WatchBatch;
pub(crate) use self::watch::WatchedTree;
use crate::shm::ShmPool;

/// The files of the box.
#[derive(Debug)]
pub(crate) struct Files {
    pool: Pool,
    guest_root: Arc<GuestRoot>,
    /// Whether a task removes abandoned uploads.
    sweeping: Arc<AtomicBool>,
    /// The order of calls that name the same object.
    turns: Turns<OrderKey>,
}

/// A source of bytes that an agent sends in pieces.
trait Pieces: Send + 'static {
    /// The next piece and its offset; `None` at the end.
    fn next(&mut self, step: &Step<'_>) -> Result<Option<(u64, Vec<u8>)>, BoxError>;
}

/// The router of `file.*`.
pub(crate) fn router(files: &Arc<Files>, shm: &ShmPool) -> Router {
    Router::builder(Arc::clone(files))
        .on::<FileRead>()
        .on::<FileWrite>()
        .on::<FileStat>()
        .on::<FileList>()
        .on::<FileFind>()
        .on::<FileGrep>()
        .on::<FileReplace>()
        .on::<FileMove>()
        .on::<FileRemove>()
        .on::<FileMkdir>()
        .on::<FileAttributes>()
        .on::<FilePack>()
        .on::<FileUnpack>()
        .on::<AgentGuest>()
        .and(&file_transfer::router(files, shm))
        .build()
}

impl Files {
    /// The files of this box, accessed as its guest.
    pub(crate) fn new(init: &Init) -> io::Result<Self> {
        let guest = init.plan.guest.clone();
        Self::with_root("/", guest, Some(init.guest_thread()?))
    }

    fn with_root(root: &str, guest: Guest, thread: Option<GuestThread>) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        Ok(Self {
            pool: Pool::new(thread),
            guest_root: Arc::new(GuestRoot::new(root, guest)),
            sweeping: Arc::default(),
            turns: Turns::default(),
        })
    }

    /// Waits for the turn of a call.
    ///
    /// Calls that name the same object run in order of arrival. The caller gets its place in the queue at once.
    pub(crate) async fn turn(&self, params: &impl Ordered) -> Turn<OrderKey> {
        let keys = params.order_keys();
        let turn = if params.is_read_only() {
            self.turns.take_shared(keys)
        } else {
            self.turns.take(keys)
        };
        turn.wait().await;
        turn
    }

    /// Applies the runtime's settings of the box.
    pub(crate) fn configure(&self, params: &AgentHealthParams) {
        if let (Some(env), Some(cwd)) = (&params.env, &params.cwd) {
            self.guest_root.set_base(PathBase {
                env: env.clone().into_map(),
                cwd: cwd.clone(),
            });
        }
        if let Some(bytes) = params.file_bytes {
            self.guest_root.set_file_bytes(bytes);
        }
    }

    /// Replaces the threads, so that changed access rules apply.
    pub(crate) fn replace_threads(&self) {
        self.pool.replace_threads();
    }

    /// Maximum size of a file, if limited.
    pub(crate) fn file_bytes(&self) -> Option<u64> {
        self.guest_root.file_bytes()
    }

    /// Starts a watch and returns a descriptor that becomes readable on events.
    pub(crate) async fn watch(
        &self,
        params: AgentWatch,
    ) -> Result<(WatchedTree, OwnedFd), BoxError> {
        self.step(move |step| WatchedTree::open(step, &params))
            .await
    }

    /// Returns the changes since the last call.
    pub(crate) async fn poll_watch(
        &self,
        mut watched: WatchedTree,
    ) -> Result<(WatchedTree, WatchBatch), BoxError> {
        let poll = move |step: &Step<'_>| watched.poll(step).map(|batch| (watched, batch));
        self.step(poll).await
    }

    /// Creates the directory of a command, and its parents.
    pub(crate) async fn make_dir(&self, path: String) -> Result<(), BoxError> {
        let make = move |step: &Step<'_>| {
            step.guest_root
                .make_dirs(&step.guest_root.path(&path, false)?)
                .map(drop)
        };
        let error = |error: BoxError| {
            BoxError::validation(format!("cwd: cannot be created: {}", error.message()))
        };
        self.step(make).await.map_err(error)
    }

    /// Sends the contents of a file.
    async fn read<A: Action>(
        &self,
        params: FileReadParams,
        sender: PieceSender<'_, A>,
    ) -> Result<FileStatInfo, BoxError> {
        let reader = self.send_all(params, FileReader::open, sender).await?;
        Ok(reader.info)
    }

    /// Sends a tree as an archive.
    async fn pack<A: Action>(
        &self,
        params: FilePackParams,
        sender: PieceSender<'_, A>,
    ) -> Result<FileTreeResult, BoxError> {
        let packer = self.send_all(params, TreePacker::open, sender).await?;
        Ok(packer.total())
    }

    /// Opens a source in its turn, sends all its pieces, and returns it.
    async fn send_all<A: Action, P: Ordered + Send + 'static, S: Pieces>(
        &self,
        params: P,
        open: fn(&Step<'_>, &P) -> Result<S, BoxError>,
        mut sender: PieceSender<'_, A>,
    ) -> Result<S, BoxError> {
        let turn = self.turn(&params).await;
        let mut source = self.step(move |step| open(step, &params)).await?;
        drop(turn);
        let mut piece = None;
        loop {
            // The next piece is read while the previous one is sent.
            let next = self.step(move |step| {
                let next = source.next(step)?;
                Ok((source, next))
            });
            let (sent, next) = tokio::join!(sender.send(piece), next);
            sent?;
            (source, piece) = next?;
            if piece.is_none() {
                return Ok(source);
            }
        }
    }

    /// Returns an error for any user but the guest: `USER`, or `USER:GROUP`.
    ///
    /// The only other user of a box is the agent's.
    pub(crate) fn check_user(&self, user: Option<&str>) -> Result<(), BoxError> {
        let guest = &self.guest_root.guest;
        let is_guest = |user: &str| {
            let (user, group) = user.split_once(':').unwrap_or((user, ""));
            let is_group = group.is_empty() || stat::is_guest(guest, guest.group, group);
            stat::is_guest(guest, guest.id, user) && is_group
        };
        match user {
            Some(user) if !is_guest(user) => {
                let guest = &guest.name;
                let message =
                    format!("user: {user:?} is not a user of this box; its only user is {guest}");
                Err(BoxError::denied(message))
            }
            _ => Ok(()),
        }
    }

    async fn step<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Step<'_>) -> Result<T, BoxError> + Send + 'static,
    ) -> Result<T, BoxError> {
        let guest_root = Arc::clone(&self.guest_root);
        let work = move |cancel: &pool::CancelFlag| {
            step(&Step {
                guest_root: &guest_root,
                cancel,
            })
        };
        self.pool.run(work).await
    }

    /// Waits until the earlier pieces of an upload have arrived.
    async fn await_earlier_pieces(&self, piece: Option<&UploadPiece>) {
        if let Some(piece) = piece {
            self.sweep_uploads();
            self.guest_root.uploads.wait_for_earlier(piece).await;
        }
    }

    /// Starts the task that removes abandoned uploads, unless it runs.
    fn sweep_uploads(&self) {
        if self.sweeping.swap(true, Ordering::Relaxed) {
            return;
        }
        let (pool, guest_root) = (self.pool.clone(), Arc::clone(&self.guest_root));
        let sweeping = Arc::clone(&self.sweeping);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(upload::IDLE_LIMIT).await;
                let guest_root = Arc::clone(&guest_root);
                let left = pool.run(move |_| Ok(guest_root.uploads.sweep())).await;
                if matches!(left, Ok(false)) {
                    return sweeping.store(false, Ordering::Relaxed);
                }
            }
        });
    }
}

/// Handlers that run one step.
macro_rules! single_step {
    ($($action:ty => $function:path;)*) => {$(
        impl Handle<$action> for Files {
            async fn handle(
                &self,
                params: <$action as Action>::Params,
                _: Call<$action>,
            ) -> Result<<$action as Action>::Result, BoxError> {
                self.check_user(params.user.as_deref())?;
                let _turn = self.turn(&params).await;
                self.step(move |step| $function(step, &params)).await
            }
        }
    )*};
}

single_step! {
    FileStat => stat::stat;
    FileList => list::list;
    FileFind => list::find;
    FileGrep => grep::grep;
    FileReplace => replace::replace;
    FileMove => change::move_path;
    FileRemove => change::remove;
    FileMkdir => change::mkdir;
    FileAttributes => stat::attributes;
}

/// Handlers that may receive one piece of an upload.
macro_rules! upload_pieces {
    ($($action:ty => $function:path, $piece:expr;)*) => {$(
        impl Handle<$action> for Files {
            async fn handle(
                &self,
                params: <$action as Action>::Params,
                _: Call<$action>,
            ) -> Result<<$action as Action>::Result, BoxError> {
                self.check_user(params.user.as_deref())?;
                let _turn = self.turn(&params).await;
                self.await_earlier_pieces(($piece)(&params).as_ref()).await;
                self.step(move |step| $function(step, &params)).await
            }
        }
    )*};
}

upload_pieces! {
    FileWrite => write::write, |params: &FileWriteParams| params.upload.clone();
    FileUnpack => unpack::unpack, |params: &FileUnpackParams| Some(params.upload.clone());
}

impl Handle<AgentGuest> for Files {
    async fn handle(&self, _: Empty, _: Call<AgentGuest>) -> Result<GuestInfo, BoxError> {
        self.step(|step| Ok(guest_info::guest_info(step))).await
    }
}

impl Handle<FileRead> for Files {
    /// A call without credit gets only the status of the file.
    async fn handle(
        &self,
        params: FileReadParams,
        mut call: Call<FileRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.check_user(params.user.as_deref())?;
        let Some(sink) = call.chunks() else {
            let _turn = self.turn(&params).await;
            let reader = self
                .step(move |step| FileReader::open(step, &params))
                .await?;
            return Ok(reader.info);
        };
        self.read(params, PieceSender::inline(sink)).await
    }
}

impl Handle<FilePack> for Files {
    async fn handle(
        &self,
        params: FilePackParams,
        mut call: Call<FilePack>,
    ) -> Result<FileTreeResult, BoxError> {
        self.check_user(params.user.as_deref())?;
        let sink = call.chunks().ok_or_else(needs_streaming)?;
        self.pack(params, PieceSender::inline(sink)).await
    }
}

fn needs_streaming() -> BoxError {
    BoxError::validation(
        "credit: this action streams its reply; set credit, for example \"_meta\":{\"credit\":16}",
    )
}
