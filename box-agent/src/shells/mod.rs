//! `shell.*`: interpreters that keep their state between runs.
//!
//! A run is a command whose process is the shell's interpreter.
//!
//! # Reading order
//! 1. This file: the calls. `agent.start` with a shell id is a run.
//! 2. `shell`: the state of a shell and its queue of runs.
//! 3. `interpreter`: the process behind it, which runs a loop of the agent and is replaced when it exits.
//! 4. `display`: values displayed by runs, by media type, and their errors.
//! 5. `ipc`: the communication of agent and interpreter; `language`: the differences between interpreters. Their loops
//!    are `shell.sh`, `python.py` and `javascript.js`.

mod display;
mod interpreter;
mod ipc;
mod language;
mod shell;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{
    ShellCreate, ShellCreateParams, ShellCreateResult, ShellDelete, ShellDeleteParams,
    ShellDeleteResult, ShellList, ShellListParams, ShellListResult,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, ShellId};
use box_rpc::{Call, Handle, Router};

use crate::agent::Agent;
use display::ReportStore;
pub(crate) use display::RunReport;
pub(crate) use interpreter::ActiveRun;
pub(crate) use shell::Shell;

/// Maximum number of shells in a box.
///
/// Each one takes a few descriptors of the agent.
const SHELLS_MAX: usize = 128;

/// The shells of the box.
#[derive(Debug, Default)]
pub(crate) struct Shells {
    table: Mutex<HashMap<ShellId, Arc<Shell>>>,
    reports: ReportStore,
}

/// The router of `shell.*`.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Handlers(Arc::clone(agent))))
        .on::<ShellCreate>()
        .on::<ShellList>()
        .on::<ShellDelete>()
        .build()
}

struct Handlers(Arc<Agent>);

impl Shells {
    fn table(&self) -> MutexGuard<'_, HashMap<ShellId, Arc<Shell>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reports(&self) -> &ReportStore {
        &self.reports
    }

    pub(crate) fn find(&self, id: &ShellId) -> Result<Arc<Shell>, BoxError> {
        let existing = self.table().get(id).cloned();
        existing.ok_or_else(|| {
            BoxError::not_found(format!("shell_id: {id} not found; create it first"))
                .with_detail(&Detail::about(Subject::Shell))
        })
    }

    /// Removes all shells from the table and returns them.
    pub(crate) fn take_all(&self) -> Vec<Arc<Shell>> {
        self.table().drain().map(|(_, shell)| shell).collect()
    }

    /// Removes a shell from the table, unless another one has its id by now.
    fn remove(&self, shell: &Arc<Shell>) -> bool {
        let mut table = self.table();
        let same = table
            .get(&shell.id)
            .is_some_and(|existing| Arc::ptr_eq(existing, shell));
        same && table.remove(&shell.id).is_some()
    }
}

impl Handle<ShellCreate> for Handlers {
    /// Creates a shell or returns the existing one.
    ///
    /// Nothing is awaited between the lookup and the insertion, so calls for the same id do not interleave.
    async fn handle(
        &self,
        params: ShellCreateParams,
        _: Call<ShellCreate>,
    ) -> Result<ShellCreateResult, BoxError> {
        let agent = &self.0;
        let _turn = agent.turn(&params).await;
        let Some(id) = params.shell_id.clone() else {
            return Err(BoxError::validation("shell_id: required"));
        };
        if let Ok(shell) = agent.shells().find(&id) {
            shell.check_same(&params)?;
            if let Some(note) = params.note {
                shell.set_note(note);
            }
            return Ok(ShellCreateResult {
                info: shell.info(),
                existed: true,
            });
        }
        if agent.shells().table().len() >= SHELLS_MAX {
            return Err(BoxError::limit(
                box_protocol::Code::Capacity,
                "the number of shells in the box",
                "shells",
                SHELLS_MAX,
            ));
        }
        let shell = Arc::new(Shell::start(agent, id.clone(), params)?);
        agent.shells().table().insert(id, Arc::clone(&shell));
        watch_idleness(agent, &shell);
        Ok(ShellCreateResult {
            info: shell.info(),
            existed: false,
        })
    }
}

/// Ends a shell that has been idle for its limit.
fn watch_idleness(agent: &Arc<Agent>, shell: &Arc<Shell>) {
    let Some(idle_limit) = shell.idle_limit() else {
        return;
    };
    let (agent, shell) = (Arc::clone(agent), Arc::downgrade(shell));
    tokio::spawn(async move {
        while let Some(shell) = shell.upgrade() {
            let left = idle_limit.saturating_sub(shell.idle_for());
            if left.is_zero() {
                if agent.shells().remove(&shell) {
                    shell.end(&agent).await;
                }
                return;
            }
            drop(shell);
            tokio::time::sleep(left).await;
        }
    });
}

impl Handle<ShellList> for Handlers {
    async fn handle(
        &self,
        params: ShellListParams,
        _: Call<ShellList>,
    ) -> Result<ShellListResult, BoxError> {
        drop(self.0.turn(&params).await);
        let table = self.0.shells().table();
        let wanted =
            |shell: &&Arc<Shell>| params.shell_id.as_ref().is_none_or(|id| *id == shell.id);
        let mut items: Vec<_> = table
            .values()
            .filter(wanted)
            .map(|shell| shell.info())
            .collect();
        items.sort_by_key(|info| info.created_at);
        Ok(ShellListResult { items })
    }
}

impl Handle<ShellDelete> for Handlers {
    async fn handle(
        &self,
        params: ShellDeleteParams,
        _: Call<ShellDelete>,
    ) -> Result<ShellDeleteResult, BoxError> {
        let agent = &self.0;
        let turn = agent.turn(&params).await;
        let Ok(shell) = agent.shells().find(&params.shell_id) else {
            return Ok(ShellDeleteResult { deleted: false });
        };
        let deleted = agent.shells().remove(&shell);
        // Later calls do not find the shell any more and need not wait for its end.
        drop(turn);
        // In its own task: if this call is dropped, the shell still ends.
        let ending = Arc::clone(agent);
        let ended = tokio::spawn(async move { shell.end(&ending).await }).await;
        ended.map_err(|_| BoxError::internal("shell: the delete task failed"))?;
        Ok(ShellDeleteResult { deleted })
    }
}
