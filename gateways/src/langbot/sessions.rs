//! The boxes of one placement, under LangBot's names.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use box_protocol::actions::{BoxCreateParams, BoxDeleteParams, BoxListParams};
use box_protocol::{BoxError, BoxId, BoxInfo, BoxState, Code};
use futures::future::join_all;
use serde_json::{Value, json};

use super::actions::{Connection, Data, members, required, run_to_completion};
use super::context::Placement;
use super::errors::{
    admission, box_limit, box_limit_reached, conflict, content_refused, field_of, no_session,
    of_class, readiness,
};
use super::fence::Lease;
use super::view::{GATEWAY, SessionView};
use super::{Installation, processes};

/// How many times a shutdown checks for boxes that were still being created.
const SHUTDOWN_ROUNDS: usize = 8;

pub(super) async fn create(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let (spec, id) = installation.spec(&placement, &data).await?;
    let params = BoxCreateParams::new(spec);
    let created = {
        let (installation, id) = (Arc::clone(&installation), id.clone());
        run_to_completion(async move {
            let created = installation
                .runtime_for_create()
                .create(&installation.caller(), params)
                .await;
            installation.in_langbot_terms(created, &id).await
        })
    };
    Ok(view(&placement, created.await?.info))
}

pub(super) async fn get(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let id = installation.physical(&placement, &required(&members(&data)?, "session_id")?)?;
    let info = installation.session(&id).await?;
    let mut view = view(&placement, info);
    let processes = processes::all(&installation, &placement, &id).await?;
    if !processes.is_empty() {
        if let Some(default) = processes.get(processes::DEFAULT_PROCESS_ID) {
            view["managed_process"] = default.clone();
        }
        view["managed_processes"] = Value::Object(processes);
    }
    Ok(view)
}

pub(super) async fn list(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
) -> Result<Value, BoxError> {
    let sessions = installation.sessions_of(&placement).await?;
    let views = sessions.into_iter().map(|info| view(&placement, info));
    Ok(json!({"sessions": views.collect::<Vec<_>>()}))
}

pub(super) async fn delete(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
    data: Data,
) -> Result<Value, BoxError> {
    let members = members(&data)?;
    let id = installation.physical(&placement, &required(&members, "session_id")?)?;
    run_to_completion(async move {
        let params = BoxDeleteParams {
            box_id: id.clone(),
            force: false,
        };
        let deleted = installation
            .runtime
            .delete(&installation.caller(), params)
            .await;
        installation.processes.forget_session(&id);
        installation.in_langbot_terms(deleted, &id).await
    })
    .await?;
    Ok(json!({"deleted": members.get("session_id")}))
}

pub(super) async fn status(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
) -> Result<Value, BoxError> {
    let all = installation.sessions().await?;
    let owned: Vec<_> = all
        .iter()
        .filter(|info| placement.owns(info.box_id.as_str()))
        .collect();
    let running = owned
        .iter()
        .map(|info| installation.processes.running_in(&info.box_id))
        .sum::<usize>();
    let runtime = installation.runtime.status(&installation.caller()).await?;
    let config = installation.config();
    let limits = &config.limits;
    let limit = installation.max_sessions(&placement).await?;
    let remaining = limits.max_sessions.saturating_sub(all.len());
    let remaining =
        remaining.min(usize::try_from(runtime.capacity.remaining).unwrap_or(usize::MAX));
    Ok(json!({
        "backend": installation.backend_info().await,
        "active_sessions": owned.len(),
        "managed_processes": running,
        "session_ttl_sec": runtime.idle_ttl_sec,
        "limits": {
            "max_sessions": limits.max_sessions,
            "max_managed_processes": limits.max_managed_processes,
            "max_completed_processes": limits.max_completed_processes,
            "max_admission_records": limits.max_admission_records,
            "max_rpc_file_bytes": limits.max_rpc_file_bytes,
        },
        "capacity": {
            "limit": limit,
            "used": owned.len(),
            "remaining": limit.saturating_sub(owned.len()).min(remaining),
        },
    }))
}

/// Deletes every box of this installation; the server refuses new ones meanwhile.
pub(super) async fn shutdown(connection: Connection) -> Result<Value, BoxError> {
    let installation = connection.installation;
    run_to_completion(async move {
        installation.closing.fetch_add(1, Ordering::AcqRel);
        let ended = installation.end_all().await;
        installation.closing.fetch_sub(1, Ordering::AcqRel);
        ended
    })
    .await?;
    Ok(json!({}))
}

impl Installation {
    /// Admits a call of this placement, after older placements are cleared.
    pub(super) async fn enter(&self, placement: &Placement) -> Result<Lease, BoxError> {
        let floor = if self.fence.knows(&placement.workspace) {
            0
        } else {
            let all = self.sessions().await?;
            let generations = all
                .iter()
                .filter_map(|info| placement.generation_of(info.box_id.as_str()));
            generations.max().unwrap_or(0)
        };
        let limit = self.config().limits.max_admission_records;
        let lease = self.fence.observe(placement, floor, limit)?;
        lease.cleared_by(|| self.clear_older(placement)).await;
        if lease.is_current() {
            Ok(lease)
        } else {
            Err(super::errors::stale())
        }
    }

    /// Deletes the boxes of the workspace's older placements.
    pub(super) async fn clear_older(&self, placement: &Placement) {
        let Ok(all) = self.sessions().await else {
            return;
        };
        // The newest placement may have changed meanwhile; none of its boxes is older than this placement.
        let older = all.into_iter().filter(|info| {
            let generation = placement.generation_of(info.box_id.as_str());
            generation.is_some_and(|of| {
                let at = Placement {
                    generation: of,
                    ..placement.clone()
                };
                of < placement.generation || self.fence.current(&at).is_none()
            })
        });
        self.end(older.collect()).await;
    }

    async fn end_all(&self) -> Result<(), BoxError> {
        for _ in 0..SHUTDOWN_ROUNDS {
            let all = self.sessions().await?;
            if all.is_empty() {
                return Ok(());
            }
            self.end(all).await;
        }
        Err(BoxError::unavailable("some boxes could not be deleted"))
    }

    /// Deletes these boxes immediately, regardless of running commands.
    pub(super) async fn end(&self, sessions: Vec<BoxInfo>) {
        let caller = self.caller();
        let ends = sessions.into_iter().map(|info| {
            self.processes.forget_session(&info.box_id);
            let params = BoxDeleteParams {
                box_id: info.box_id,
                force: true,
            };
            self.runtime.delete(&caller, params)
        });
        for ended in join_all(ends).await {
            if let Err(error) = ended
                && error.code() != Code::NotFound
            {
                tracing::warn!(%error, "cannot delete a box");
            }
        }
    }

    /// Returns every usable box of this installation, in all workspaces.
    pub(super) async fn sessions(&self) -> Result<Vec<BoxInfo>, BoxError> {
        let params = BoxListParams {
            gateway: Some(GATEWAY),
            ..BoxListParams::default()
        };
        let mut all = self.runtime.list(&self.caller(), &params).await?.items;
        all.retain(|info| info.state != BoxState::Failed);
        Ok(all)
    }

    pub(super) async fn sessions_of(
        &self,
        placement: &Placement,
    ) -> Result<Vec<BoxInfo>, BoxError> {
        let mut all = self.sessions().await?;
        all.retain(|info| placement.owns(info.box_id.as_str()));
        Ok(all)
    }

    /// Returns a usable box.
    pub(super) async fn session(&self, id: &BoxId) -> Result<BoxInfo, BoxError> {
        let info = self.runtime.get(&self.caller(), id).await;
        info.ok()
            .filter(|info| info.state != BoxState::Failed)
            .ok_or_else(|| no_session(id.as_str()))
    }

    /// Converts the runtime's answer about this box to LangBot's error texts.
    pub(super) async fn in_langbot_terms<T>(
        &self,
        outcome: Result<T, BoxError>,
        id: &BoxId,
    ) -> Result<T, BoxError> {
        let Err(error) = outcome else {
            return outcome;
        };
        if error.code() == Code::NotFound {
            return Err(no_session(id.as_str()));
        }
        if let Some(message) = content_refused(&error) {
            return Err(of_class("BoxError", error.code(), &message));
        }
        if let Some(limit) = box_limit(&error) {
            return Err(box_limit_reached(limit));
        }
        let Some(field) = field_of(&error) else {
            return Err(error);
        };
        match self.runtime.get(&self.caller(), id).await {
            Ok(info) => Err(conflict(&field, &info)),
            Err(_) => Err(error),
        }
    }

    /// Returns the id of the box that a call names.
    ///
    /// If grants are required, a workspace has exactly one box.
    pub(super) fn physical(&self, placement: &Placement, logical: &str) -> Result<BoxId, BoxError> {
        let only_session = self
            .admission
            .required()
            .map(|policy| policy.logical_session_id);
        if only_session.is_some_and(|only_session| only_session != logical.trim()) {
            return Err(admission("Managed sandbox session_id is runtime-owned"));
        }
        placement.physical(logical)
    }

    /// Returns an error while a shutdown is in progress.
    pub(super) fn refuse_if_closing(&self) -> Result<(), BoxError> {
        if self.is_closing() {
            return Err(super::errors::shutting_down());
        }
        Ok(())
    }

    /// Returns the maximum number of boxes of a workspace.
    async fn max_sessions(&self, placement: &Placement) -> Result<usize, BoxError> {
        let limit = self.config().limits.max_sessions;
        let Some(grant) = self.require_grant(placement).await? else {
            return Ok(limit);
        };
        let granted =
            usize::try_from(grant.max_sessions).map_err(|_| readiness("the grant is too large"))?;
        Ok(limit.min(granted))
    }
}

/// Returns a backend's name with the features that its boxes lack.
pub(super) fn backend_label(backend: &str, degraded: &[String]) -> String {
    if degraded.is_empty() {
        backend.to_owned()
    } else {
        format!("{backend}, without {}", degraded.join(", "))
    }
}

/// Converts a box to LangBot's format.
fn view(placement: &Placement, mut info: BoxInfo) -> Value {
    info.backend_name = backend_label(&info.backend_name, &info.degraded);
    let view = json!(SessionView::from(&info));
    let mut view = if view.is_object() { view } else { json!({}) };
    view["session_id"] = placement.logical(info.box_id.as_str()).into();
    view
}
