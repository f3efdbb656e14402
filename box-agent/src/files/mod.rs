//! `file.*`: files touched from inside the box, as the guest would touch them.
//!
//! # Reading order
//! 1. This file: the calls. Each is a step, or a row of steps, on a thread of the `pool`, which is the guest's.
//! 2. `ground`: the way from a path to a descriptor. Nothing here looks a path up twice and believes both.
//! 3. `path`: paths as they are asked for; `error`: what the system's errors mean.
//! 4. `stat`, `read`, `write` with `draft` and `upload`, `replace`, `change` with `copy`: one file, or one thing.
//! 5. `facts`: what the box is like, which is found out from its files.
//! 6. `spooled`: the same calls, with what they move in a slot instead of in messages.
//! 7. `walk`, and what is built on it: `list`, `grep`, `pack`. `unpack` goes the other way.
//! 8. `watch`: what changes in a tree.

mod change;
mod copy;
mod draft;
mod error;
mod facts;
mod grep;
mod ground;
mod list;
mod pack;
mod path;
mod pool;
mod read;
mod replace;
mod spooled;
mod stat;
#[cfg(test)]
mod tests;
mod unpack;
mod upload;
mod walk;
mod watch;
mod write;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use box_protocol::BoxError;
use box_protocol::actions::{
    AgentGuest, AgentHealthParams, AgentWatch, FileAttributes, FileFind, FileGrep, FileList,
    FileMkdir, FileMove, FilePack, FilePackParams, FileRead, FileReadParams, FileRemove,
    FileReplace, FileStat, FileStatInfo, FileTreeResult, FileUnpack, FileUnpackParams, FileWrite,
    FileWriteParams, GuestFacts, Named, Names, UploadPiece,
};
use box_rpc::{Action, Call, Empty, Handle, Router, Turn, Turns};
use box_sys::{Guest, GuestThread, Init};
use rustix::fs::{Mode, OFlags};

use self::ground::{Ground, Step};
use self::pack::Packing;
use self::path::Base;
use self::pool::Pool;
use self::read::Reading;
use self::spooled::Telling;
use self::watch::Seen;
pub(crate) use self::watch::Watched;
use crate::shm::ShmPool;

/// The files of the box.
#[derive(Debug)]
pub(crate) struct Files {
    pool: Pool,
    ground: Arc<Ground>,
    /// Whether somebody looks after abandoned uploads.
    swept: Arc<AtomicBool>,
    /// Of calls that name the same thing in the box.
    turns: Turns<Named>,
}

/// What the agent serves of `file.*`.
pub(crate) fn router(files: &Arc<Files>, slots: &ShmPool) -> Router {
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
        .and(&spooled::router(files, slots))
        .build()
}

impl Files {
    /// The files of this box, touched as its guest.
    pub(crate) fn new(init: &Init) -> io::Result<Self> {
        let guest = init.plan.guest.clone();
        Self::below("/", guest, Some(init.guest_thread()?))
    }

    fn below(root: &str, guest: Guest, thread: Option<GuestThread>) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        Ok(Self {
            pool: Pool::new(thread),
            ground: Arc::new(Ground::new(root, guest)),
            swept: Arc::default(),
            turns: Turns::default(),
        })
    }

    /// Waits for the turn of a call behind all that name the same, which is taken at once.
    pub(crate) async fn turn(&self, params: &impl Names) -> Turn<Named> {
        let names = params.names();
        let turn = if params.only_looks() {
            self.turns.take_shared(names)
        } else {
            self.turns.take(names)
        };
        turn.comes().await;
        turn
    }

    /// Takes what the runtime says about the box.
    pub(crate) fn learn(&self, said: &AgentHealthParams) {
        if let (Some(env), Some(cwd)) = (&said.env, &said.cwd) {
            self.ground.set_base(Base {
                env: env.clone().into_map(),
                cwd: cwd.clone(),
            });
        }
        if let Some(bytes) = said.file_bytes {
            self.ground.set_file_bytes(bytes);
        }
    }

    /// Has files touched under the rules there are now, which have changed.
    pub(crate) fn renew(&self) {
        self.pool.renew();
    }

    /// The most bytes that one file may have, if there is a limit.
    pub(crate) fn file_bytes(&self) -> Option<u64> {
        self.ground.file_bytes()
    }

    /// Begins to watch, and gives a descriptor that can be read once something has happened.
    pub(crate) async fn watch(&self, asked: AgentWatch) -> Result<(Watched, OwnedFd), BoxError> {
        self.step(move |step| Watched::open(step, &asked)).await
    }

    /// What has happened to what is watched.
    pub(crate) async fn look(&self, mut watched: Watched) -> Result<(Watched, Seen), BoxError> {
        let look = move |step: &Step<'_>| watched.look(step).map(|seen| (watched, seen));
        self.step(look).await
    }

    /// Makes a directory for a command, and those above it.
    pub(crate) async fn make_dir(&self, path: String) -> Result<(), BoxError> {
        let make = move |step: &Step<'_>| {
            step.ground
                .make_dirs(&step.ground.path(&path, false)?)
                .map(drop)
        };
        let refused = |error: BoxError| {
            BoxError::validation(format!("cwd: cannot be made: {}", error.message()))
        };
        self.step(make).await.map_err(refused)
    }

    /// Tells what is in a file.
    async fn read<A: Action>(
        &self,
        asked: FileReadParams,
        mut told: Telling<'_, A>,
    ) -> Result<FileStatInfo, BoxError> {
        let turn = self.turn(&asked).await;
        let mut reading = self.step(move |step| Reading::open(step, &asked)).await?;
        drop(turn);
        let mut piece = None;
        loop {
            // The next piece is read while the one before is told.
            let next = self.step(move |_| {
                let next = reading.next()?;
                Ok((reading, next))
            });
            let (sent, next) = tokio::join!(told.tell(piece), next);
            sent?;
            (reading, piece) = next?;
            if piece.is_none() {
                return Ok(reading.info);
            }
        }
    }

    /// Tells what is in a tree, as an archive.
    async fn pack<A: Action>(
        &self,
        asked: FilePackParams,
        mut told: Telling<'_, A>,
    ) -> Result<FileTreeResult, BoxError> {
        let turn = self.turn(&asked).await;
        let mut packing = self.step(move |step| Packing::open(step, &asked)).await?;
        drop(turn);
        let (mut piece, mut offset) = (None, 0);
        loop {
            let next = self.step(move |step| {
                let bytes = packing.next(step)?;
                Ok((packing, bytes))
            });
            let (sent, next) = tokio::join!(told.tell(piece), next);
            sent?;
            let (back, bytes) = next?;
            packing = back;
            if bytes.is_empty() {
                return Ok(packing.total());
            }
            let length = bytes.len() as u64;
            piece = Some((offset, bytes));
            offset += length;
        }
    }

    /// There are two users in a box, and one of them is this process.
    pub(crate) fn check_user(&self, user: Option<&str>) -> Result<(), BoxError> {
        match user {
            Some(user) if !stat::is_guest(&self.ground.guest, user) => {
                let only = &self.ground.guest.name;
                let message = format!("user: not a user of this box; its only user is {only}");
                Err(BoxError::denied(message))
            }
            _ => Ok(()),
        }
    }

    async fn step<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Step<'_>) -> Result<T, BoxError> + Send + 'static,
    ) -> Result<T, BoxError> {
        let ground = Arc::clone(&self.ground);
        let work = move |wanted: &pool::Wanted| {
            step(&Step {
                ground: &ground,
                wanted,
            })
        };
        self.pool.run(work).await
    }

    /// Waits for the turn of a piece of an upload.
    async fn begin_piece(&self, piece: Option<&UploadPiece>) {
        if let Some(piece) = piece {
            self.look_after_uploads();
            self.ground.uploads.lead_up_to(piece).await;
        }
    }

    /// Sees to it that uploads which nobody goes on with are removed.
    fn look_after_uploads(&self) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        let (pool, ground) = (self.pool.clone(), Arc::clone(&self.ground));
        let swept = Arc::clone(&self.swept);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(upload::ABANDONED).await;
                let ground = Arc::clone(&ground);
                let left = pool.run(move |_| Ok(ground.uploads.sweep())).await;
                if matches!(left, Ok(false)) {
                    return swept.store(false, Ordering::Relaxed);
                }
            }
        });
    }
}

/// Calls that are one step.
macro_rules! plain {
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

plain! {
    FileStat => stat::stat;
    FileList => list::list;
    FileFind => list::find;
    FileGrep => grep::grep;
    FileReplace => replace::replace;
    FileMove => change::transfer;
    FileRemove => change::remove;
    FileMkdir => change::mkdir;
    FileAttributes => stat::attributes;
}

/// Those that may be a piece of something larger.
macro_rules! pieces {
    ($($action:ty => $function:path, $piece:expr;)*) => {$(
        impl Handle<$action> for Files {
            async fn handle(
                &self,
                params: <$action as Action>::Params,
                _: Call<$action>,
            ) -> Result<<$action as Action>::Result, BoxError> {
                self.check_user(params.user.as_deref())?;
                let _turn = self.turn(&params).await;
                self.begin_piece(($piece)(&params).as_ref()).await;
                self.step(move |step| $function(step, &params)).await
            }
        }
    )*};
}

pieces! {
    FileWrite => write::write, |params: &FileWriteParams| params.upload.clone();
    FileUnpack => unpack::unpack, |params: &FileUnpackParams| Some(params.upload.clone());
}

impl Handle<AgentGuest> for Files {
    async fn handle(&self, _: Empty, _: Call<AgentGuest>) -> Result<GuestFacts, BoxError> {
        self.step(|step| Ok(facts::facts(step))).await
    }
}

impl Handle<FileRead> for Files {
    /// Without chunks it only tells about the file.
    async fn handle(
        &self,
        params: FileReadParams,
        mut call: Call<FileRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.check_user(params.user.as_deref())?;
        let Some(sink) = call.chunks() else {
            let _turn = self.turn(&params).await;
            let reading = self.step(move |step| Reading::open(step, &params)).await?;
            return Ok(reading.info);
        };
        self.read(params, Telling::inline(sink)).await
    }
}

impl Handle<FilePack> for Files {
    async fn handle(
        &self,
        params: FilePackParams,
        mut call: Call<FilePack>,
    ) -> Result<FileTreeResult, BoxError> {
        self.check_user(params.user.as_deref())?;
        let sink = call.chunks().ok_or_else(only_in_chunks)?;
        self.pack(params, Telling::inline(sink)).await
    }
}

fn only_in_chunks() -> BoxError {
    BoxError::validation(
        "credit: this action streams its reply; set credit, for example \"_meta\":{\"credit\":16}",
    )
}
