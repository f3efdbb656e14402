//! Start of a box: a new one, one that waits in a pool, or a stopped one.
//!
//! # Steps
//! 1. The selector chooses the first available backend (`backend_choice.rs`).
//! 2. The runtime resolves the image of the spec, and pulls it if necessary (`images/resolve.rs`).
//! 3. The backend creates the box and returns a connection to its agent (`native/create.rs`).
//! 4. The runtime checks the health of the agent and passes it the environment of the box.
//! 5. The backend applies the network policy, before any process of the guest runs.
//! 6. The agent runs the commands of `prepare` (`prepare.rs`).
//! 7. The agent starts the main command, if the spec has one (`main_command.rs`).
//! 8. The runtime writes the record of the box, if boxes outlive it, and opens the access for calls.
//!
//! A box of a pool has passed steps 1 to 7 before (`pools/`).
//!
//! A pull has no time limit. If another step fails or takes too long, the runtime stops the box and
//! the call gets the error.

use std::sync::Arc;

use box_protocol::actions::AgentHealthParams;
use box_protocol::{BoxError, BoxSpec, BoxState, UnixMs};
use uuid::Uuid;

use super::ending::broken;
use super::instance::{Instance, RunningBox, bounded};
use super::mounts::mounted;
use super::{Actor, Request};
use crate::backend::{Backend, Facts, StartRequest, StartedBox};
use crate::box_actor::entry::{BoxEntry, Location, Mounts};
use crate::environment::box_environment;
use crate::images::ResolvedImage;
use crate::layers::LayerUse;
use crate::pools::{Pools, Taken};
use crate::volumes::MountedVolume;

impl Actor {
    /// Keeps the entry of a box that could not start, so that later callers can read the reason.
    pub(super) async fn keep_failed(&mut self, request: Request, error: BoxError) {
        self.entry.set_not_started(error.message().to_owned());
        // A caller that has seen the box start may see that it failed from now on.
        self.entry.mark_changed();
        self.queue.refuse_waiting(&error);
        let _ = self.instance.stop().await;
        let _ = self.entry.persist_unstarted().await;
        // The idle timer of a failed entry begins here.
        self.queue.mark_used();
        self.queue.reset_timers();
        request.refuse(error);
    }
}

impl BoxEntry {
    /// Records that the box could not start.
    pub(super) fn set_not_started(&self, reason: String) {
        let later = format!("box {} did not start: {reason}", self.spec.box_id);
        self.set_failed(broken(later), reason);
    }
}

impl Instance {
    /// Starts the box, or takes it from a pool.
    pub(super) async fn start(
        &mut self,
        requested: &BoxSpec,
        pulls_all: bool,
    ) -> Result<(), BoxError> {
        if !self.take_from_pool(requested).await? {
            self.launch(requested, pulls_all).await?;
        }
        self.publish().await
    }

    /// Takes the box from a pool, if the request allows it and one is ready.
    async fn take_from_pool(&mut self, requested: &BoxSpec) -> Result<bool, BoxError> {
        // A restarted box is no longer what the pool prepared.
        {
            let status = self.entry.status();
            let has_files = !status.files.layers.is_empty() || status.files.disk.is_some();
            if !status.backend_name.is_empty() || has_files {
                return Ok(false);
            }
        }
        let items = &self.shared.items;
        let pools = items.pools_for(&self.shared.pools, &self.entry.owner, requested)?;
        loop {
            match Pools::take(&pools, requested) {
                Taken::NotAsked => return Ok(false),
                Taken::Missed(reason) => {
                    self.entry.status().pool_missed = Some(reason);
                    return Ok(false);
                }
                Taken::Member(pool, member) => {
                    // This instance has the box before the first await, so that it ends with the
                    // call if the call ends now.
                    let located = self.take_over(*member, requested);
                    if self.is_alive().await {
                        if let Err(error) = located {
                            let _ = self.stop().await;
                            return Err(error);
                        }
                        self.entry.status().pool = Some(pool);
                        return Ok(true);
                    }
                    let _ = self.stop().await;
                    self.entry.status().backend_name = Arc::default();
                }
            }
        }
    }

    /// Makes the box of another instance the box of this one.
    fn take_over(&mut self, mut from: Instance, requested: &BoxSpec) -> Result<(), BoxError> {
        let Some(running) = from.running.take() else {
            return Err(BoxError::internal("a box of a pool has no agent"));
        };
        from.entry.clear_location();
        running.audit.taken(&from.entry, &self.entry);
        let backend = Arc::clone(&running.backend);
        let id = running.id;
        self.mark_starting(&backend);
        {
            let mut others = from.entry.status();
            let mut status = self.entry.status();
            status.backend_id = std::mem::take(&mut others.backend_id);
            status.facts = std::mem::take(&mut others.facts);
            status.image = others.image.take();
            status.files = std::mem::take(&mut others.files);
            status.uses.append(&mut others.uses);
        }
        self.running = Some(running);
        self.locate(backend, id, requested)
    }

    /// Starts a box, up to its main command. It has no record, and no call can use it.
    pub(crate) async fn launch(
        &mut self,
        requested: &BoxSpec,
        pulls_all: bool,
    ) -> Result<(), BoxError> {
        let choice = self.shared.selector.choose().await;
        let backend = choice.backend_for(requested)?;
        let was_stopped = self.is_stopped();
        let is_restart = self.mark_starting(backend) && !was_stopped;
        if is_restart {
            self.entry.status().files.reset_to_origin();
            // A box that replaces a dead one is another box.
            self.shared.unique_ids.renew(&self.entry);
            // The record of a box that has failed before its first start.
            self.entry.mark_changed();
        }
        // A restarted box keeps its original spec except for the mounts. Only the mounts of this
        // call have been authorized now.
        let restart_spec = is_restart.then(|| {
            let mut spec = self.entry.spec.clone();
            spec.extra_mounts.clone_from(&requested.extra_mounts);
            spec.name.clone_from(&self.entry.status().name);
            spec
        });
        let spec = restart_spec.as_ref().unwrap_or(requested);
        self.use_snapshot(spec)?;
        self.bound_layers(&**backend).await?;
        let on_layers = self.with_image_below(spec);
        let of_image = on_layers.as_ref().unwrap_or(spec);
        let mut image = self.shared.images.resolve(of_image, pulls_all).await?;
        let id = Uuid::now_v7();
        self.to_stop = Some((Arc::clone(backend), id));
        if let Some(image) = &mut image {
            self.shared.images.hold(id, image.lease.take());
        }
        let defaults = image.as_ref().map(|image| Box::new(image.defaults.clone()));
        self.entry.status().image = defaults;
        let limit = self.shared.config.start_timeout;
        let creation = self.create(backend, id, spec, image);
        let created = bounded(&**backend, "start", limit, creation).await;
        let (running, (backend_id, facts)) = match created.and_then(|created| created) {
            Ok(created) => created,
            Err(error) => {
                let _ = self.stop().await;
                return Err(error);
            }
        };
        self.to_stop = None;
        self.running = Some(running);
        // The files of a stopped box are prepared already.
        let prepared = if was_stopped {
            Ok(())
        } else {
            self.prepare().await
        };
        let ready = match prepared {
            Ok(()) => self.start_main().await,
            Err(error) => Err(self.end_reason().unwrap_or(error)),
        };
        if let Err(error) = ready {
            let _ = self.stop().await;
            return Err(error);
        }
        let mut status = self.entry.status();
        status.backend_id = backend_id;
        status.facts = facts;
        Ok(())
    }

    /// Writes the record of a box and opens the access for calls.
    async fn publish(&mut self) -> Result<(), BoxError> {
        let now = UnixMs::now();
        let was_stopped = {
            let mut status = self.entry.status();
            let was_stopped = status.stopped.is_some();
            status.set_state(BoxState::Running);
            status.last_used_at = now;
            if !was_stopped {
                status.created_at = now;
            }
            was_stopped
        };
        // A later process could not adopt a box without a record.
        self.entry.mark_changed();
        if let Err(error) = self.entry.wait_persisted().await {
            let _ = self.stop().await;
            return Err(error);
        }
        let degraded = self.entry.status().facts.degraded.join(", ");
        // The change of state has an event of its own.
        if !was_stopped {
            self.shared.events.record(&self.entry, "started", "");
        }
        if !degraded.is_empty() {
            let message = format!("without {degraded}");
            self.shared.events.record(&self.entry, "degraded", &message);
        }
        self.entry.status().end_unstarted();
        self.entry.remove_obsolete_records().await;
        self.open_access();
        Ok(())
    }

    /// Records that this backend starts the box; returns whether it is a restart.
    fn mark_starting(&self, backend: &Arc<dyn Backend>) -> bool {
        self.entry.access.set_starting();
        let mut status = self.entry.status();
        // A failed box of an earlier process has no backend yet.
        let is_restart = status.state == BoxState::Failed || !status.backend_name.is_empty();
        status.set_state(BoxState::Starting);
        status.reason = None;
        status.pool = None;
        status.backend_name = backend.name().into();
        is_restart
    }

    /// Starts the box with the backend and connects to its agent.
    async fn create(
        &self,
        backend: &Arc<dyn Backend>,
        id: Uuid,
        spec: &BoxSpec,
        image: Option<ResolvedImage>,
    ) -> Result<(RunningBox, (String, Facts)), BoxError> {
        let root = image.as_ref().map(|image| &image.root);
        let volumes = self.mount_volumes(spec)?;
        let (layers, disk) = {
            let status = self.entry.status();
            (status.files.layers.clone(), status.files.disk.clone())
        };
        let layers: Vec<_> = layers.iter().map(LayerUse::layer).collect();
        let disk = disk.map(|disk| disk.path());
        let request = StartRequest::new(id, spec)
            .with_image(root)
            .with_layers(&layers)
            .with_disk(disk.as_deref())
            .with_volumes(&volumes);
        let StartedBox {
            backend_id,
            connection,
            facts,
            shm,
        } = backend.start(request).await?;
        let defaults = self.entry.command_defaults();
        let health = AgentHealthParams {
            env: Some(box_environment(spec, &facts, root.map(|root| &root.env))?),
            cwd: defaults.cwd.or_else(|| Some(spec.mount_path.clone())),
            file_bytes: spec.file_bytes(),
        };
        let connection = (connection, shm);
        let running = RunningBox::connect(&self.shared, (backend, id), connection, &health).await?;
        self.locate(Arc::clone(backend), id, spec)?;
        Ok((running, (backend_id, facts)))
    }

    /// Records where the box is, and applies its network policy.
    fn locate(&self, backend: Arc<dyn Backend>, id: Uuid, spec: &BoxSpec) -> Result<(), BoxError> {
        let mounts = Mounts {
            requested: mounted(&spec.extra_mounts).cloned().collect(),
            added: Vec::new(),
        };
        self.entry.set_location(Location { backend, id }, mounts)
    }

    /// Reserves the volumes of the spec for this box, until it is stopped.
    fn mount_volumes(&self, spec: &BoxSpec) -> Result<Vec<MountedVolume>, BoxError> {
        let earlier = self.entry.status().volumes.clone();
        let items = &self.shared.items;
        let (volumes, uses) = items.mount(&self.entry.owner, spec, &earlier)?;
        let mut status = self.entry.status();
        status.volumes = volumes.iter().map(|volume| volume.id.clone()).collect();
        status.uses.extend(uses);
        Ok(volumes)
    }
}
