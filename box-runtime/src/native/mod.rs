//! Boxes made with nothing but this machine's kernel.
//!
//! # Reading order
//! 1. [`NativeConfig`]: every setting.
//! 2. `plan`: from a spec to what the kernel is asked for.
//! 3. This file: [`NativeBackend`], the boxes there are, and the way each begins and ends.
//! 4. `server`: the fork server behind it, and what this machine has.
//! 5. `error`: what the kernel's refusals are called here.
//!
//! # A box
//! Its first process is the agent, forked by the fork server together with the box. It is handed one end of a socket pair,
//! which is the connection to it from the first moment on, and a slot for output: memory of fixed size that both sides see.

mod config;
mod error;
mod plan;
mod server;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::actions::SPOOL_BYTES;
use box_protocol::{BoxError, BoxMountSpec, Network};
use box_rpc::Limits;
use box_sys::{Sandbox, Source};
use box_transports::unix;
use rustix::fs::{MemfdFlags, SealFlags};
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use uuid::Uuid;

pub use self::config::NativeConfig;
use self::error::{failed, in_words};
use self::server::Server;
pub use self::server::primitives;
use crate::backend::{Availability, Backend, Capabilities, Facts, StartRequest, StartedBox};
use crate::spool::Spool;

/// Boxes that the fork server may be asked for at once. It makes one after the other; what waits for it waits here, and
/// asking never blocks.
const MAKING: usize = 8;

/// Makes boxes with nothing but this machine's kernel. Clones are the same backend; with the last one go its boxes.
#[derive(Debug, Clone)]
pub struct NativeBackend(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NativeConfig,
    server: Server,
    making: Semaphore,
    boxes: Mutex<HashMap<Uuid, Arc<Sandbox>>>,
}

impl NativeBackend {
    /// A backend that makes no box before it is asked to.
    pub fn new(config: NativeConfig) -> Self {
        Self(Arc::new(Inner {
            server: Server::new(&config),
            config,
            making: Semaphore::new(MAKING),
            boxes: Mutex::default(),
        }))
    }

    fn boxes(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Sandbox>>> {
        self.0.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sandbox(&self, id: Uuid) -> Option<Arc<Sandbox>> {
        self.boxes().get(&id).cloned()
    }
}

#[async_trait]
impl Backend for NativeBackend {
    fn name(&self) -> &'static str {
        "native"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default().with_added_mounts()
    }

    async fn availability(&self) -> Availability {
        self.0.server.availability().await
    }

    async fn start(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        let (plan, sources, rootfs) = plan::of(&request, &self.0.config)?;
        let (near, far) = UnixStream::pair().map_err(failed)?;
        near.set_nonblocking(true).map_err(failed)?;
        let (spool, slot) = spool().map_err(failed)?;
        let server = self.0.server.running().await?;
        let place = self.0.making.acquire().await;
        let sources: Vec<_> = sources.iter().map(AsFd::as_fd).collect();
        let making = server.begin(&plan, &[far.as_fd(), slot.as_fd()], &sources);
        let making = making.map_err(|error| in_words(&error))?;
        // If the box dies while it is made, this end learns it.
        drop((far, slot));
        readable(making.as_fd()).await.map_err(failed)?;
        let sandbox = making.finish().map_err(|error| in_words(&error))?;
        drop(place);
        let missing = sandbox.missing().to_vec();
        self.boxes().insert(request.id, Arc::new(sandbox));
        let stream = tokio::net::UnixStream::from_std(near).map_err(failed)?;
        let connection = unix::over(stream, &Limits::in_process());
        // Only a spec that can do without a network comes here with one.
        let no_network = (request.spec.network == Network::On).then(|| "network".to_owned());
        let facts = Facts {
            rootfs: Some(rootfs),
            missing,
            degraded: no_network.into_iter().collect(),
            ..Facts::default()
        };
        let started = StartedBox::new(request.id.simple().to_string(), connection);
        Ok(started.with_facts(facts).with_spool(spool))
    }

    async fn alive(&self, id: Uuid) -> bool {
        let sandbox = self.sandbox(id);
        sandbox.is_some_and(|sandbox| matches!(sandbox.wait(Some(Duration::ZERO)), Ok(false)))
    }

    async fn add_mounts(&self, id: Uuid, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let sandbox = self.sandbox(id);
        let sandbox = sandbox.ok_or_else(|| BoxError::unavailable("the box is gone"))?;
        let server = self.0.server.running().await?;
        for mount in mounts {
            let Some((mount, source)) = plan::mount(mount, 0)? else {
                continue;
            };
            debug_assert_eq!(mount.source, Source::Fd(0));
            let (server, sandbox) = (Arc::clone(&server), Arc::clone(&sandbox));
            let adding = move || server.add_mount(&sandbox, &mount, Some(source.as_fd()));
            let added = tokio::task::spawn_blocking(adding).await;
            let added = added.map_err(|_| BoxError::internal("a mount failed unexpectedly"))?;
            added.map_err(|error| in_words(&error))?;
        }
        Ok(())
    }

    async fn stop(&self, id: Uuid) -> Result<(), BoxError> {
        let Some(sandbox) = self.sandbox(id) else {
            return Ok(());
        };
        sandbox.kill().map_err(|error| in_words(&error))?;
        readable(sandbox.pidfd()).await.map_err(failed)?;
        // Not before: whoever gives up waiting can ask again.
        self.boxes().remove(&id);
        Ok(())
    }
}

/// A slot for output, and the agent's end of it. Neither side can change its size, and what is written to it counts as the
/// box's memory.
fn spool() -> io::Result<(Spool, OwnedFd)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("box-spool", flags)?;
    rustix::fs::ftruncate(&file, SPOOL_BYTES)?;
    let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    let ours = file.try_clone()?;
    Ok((Spool::new(File::from(ours)), file))
}

/// Waits until a descriptor can be read.
#[expect(
    deprecated,
    reason = "sound for an OwnedFd, which stays the same; the new way is `unsafe` for the sake of others"
)]
async fn readable(fd: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    let watched = AsyncFd::with_interest(fd.try_clone_to_owned()?, tokio::io::Interest::READABLE)?;
    watched.readable().await?.retain_ready();
    Ok(())
}
