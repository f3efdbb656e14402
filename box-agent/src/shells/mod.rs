//! `shell.*`: interpreters that keep their state between runs. A run is a command like any other, but its process is the
//! shell's.
//!
//! # Reading order
//! 1. This file: the calls. `agent.start` with a shell's id is a run.
//! 2. `shell`: what is known of a shell, and its runs, one after the other.
//! 3. `interpreter`: the process behind it, which is in a loop of ours and replaced when it ends.
//! 4. `shown`: what runs show by media type.
//! 5. `exchange`: how agent and interpreter speak; `language`: how interpreters differ. Their loops are `shell.sh`,
//!    `python.py` and `javascript.js`.

mod exchange;
mod interpreter;
mod language;
mod shell;
mod shown;

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
pub(crate) use interpreter::Turn;
pub(crate) use shell::Shell;
pub(crate) use shown::Besides;
use shown::Shows;

/// Shells of one box at once; each takes a few descriptors of the agent's.
const SHELLS_MAX: usize = 128;

/// The shells of the box.
#[derive(Debug, Default)]
pub(crate) struct Shells {
    table: Mutex<HashMap<ShellId, Arc<Shell>>>,
    shows: Shows,
}

/// What the agent serves of `shell.*`.
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

    fn shows(&self) -> &Shows {
        &self.shows
    }

    pub(crate) fn find(&self, id: &ShellId) -> Result<Arc<Shell>, BoxError> {
        let there = self.table().get(id).cloned();
        there.ok_or_else(|| {
            BoxError::not_found("no such shell").with_detail(&Detail::about(Subject::Shell))
        })
    }

    /// Takes all of them off the table.
    pub(crate) fn take_all(&self) -> Vec<Arc<Shell>> {
        self.table().drain().map(|(_, shell)| shell).collect()
    }

    /// Takes it off the table, if it is still that one.
    fn remove(&self, shell: &Arc<Shell>) -> bool {
        let mut table = self.table();
        let same = table
            .get(&shell.id)
            .is_some_and(|there| Arc::ptr_eq(there, shell));
        same && table.remove(&shell.id).is_some()
    }
}

impl Handle<ShellCreate> for Handlers {
    /// Nothing is waited for on the way, so whoever asks for the same id comes before or after.
    async fn handle(
        &self,
        params: ShellCreateParams,
        _: Call<ShellCreate>,
    ) -> Result<ShellCreateResult, BoxError> {
        let agent = &self.0;
        let _turn = agent.turn(&params).await;
        let Some(id) = params.shell_id.clone() else {
            return Err(BoxError::validation("shell_id: must be given"));
        };
        if let Ok(shell) = agent.shells().find(&id) {
            shell.fits(&params)?;
            if let Some(note) = params.note {
                shell.note(note);
            }
            return Ok(ShellCreateResult {
                info: shell.info(),
                existed: true,
            });
        }
        if agent.shells().table().len() >= SHELLS_MAX {
            return Err(BoxError::limit(
                box_protocol::Code::Capacity,
                "shells of one box at once",
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

/// Ends a shell that has been idle for as long as it may.
fn watch_idleness(agent: &Arc<Agent>, shell: &Arc<Shell>) {
    let Some(patience) = shell.patience() else {
        return;
    };
    let (agent, shell) = (Arc::clone(agent), Arc::downgrade(shell));
    tokio::spawn(async move {
        while let Some(shell) = shell.upgrade() {
            let left = patience.saturating_sub(shell.idle());
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
        // Calls behind this one do not find the shell any more, and need not wait for its end.
        drop(turn);
        // Not with this call: nobody else would end it.
        let ending = Arc::clone(agent);
        let ended = tokio::spawn(async move { shell.end(&ending).await }).await;
        ended.map_err(|_| BoxError::internal("the shell was not ended"))?;
        Ok(ShellDeleteResult { deleted })
    }
}
