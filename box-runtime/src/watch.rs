//! `file.watch`: a command that the agent itself runs.

use box_protocol::actions::{
    AgentStartParams, AgentWatch, CommandChunk, CommandStartResult, FileWatch, FileWatchParams,
};
use box_protocol::{BoxError, Program, Role};
use box_rpc::{Call, Handle};
use tokio::sync::mpsc;

use crate::commands::id_or_new;
use crate::handlers::streaming;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

impl BoxRuntime {
    /// Watches files, or finds the watch that has this id.
    ///
    /// With a channel for chunks and `attach`, the call lasts until reading ends. Dropping the
    /// future then ends the watch, unless the caller chose its id and can find it again.
    pub async fn watch_files(
        &self,
        caller: &Caller,
        params: FileWatchParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let attach = chunks.and_then(|chunks| Some((chunks, params.attach?)));
        let keep = params.command_id.is_some();
        let program = Program::argv([FILE_WATCH.to_owned(), params.path.clone()])?;
        let agent_params = AgentStartParams {
            user: params.user,
            keep,
            role: Role::Watch,
            watch: Some(Box::new(AgentWatch {
                path: params.path,
                recursive: params.recursive,
                expand: params.expand,
            })),
            ..AgentStartParams::new(id_or_new(params.command_id)?, program, "/")
        };
        self.begin(&lease, agent_params, ticket, attach).await
    }
}

/// The program name that a watch reports.
const FILE_WATCH: &str = <FileWatch as box_rpc::Action>::NAME;

streaming! {
    FileWatch: watch_files(FileWatchParams) -> CommandStartResult;
}
