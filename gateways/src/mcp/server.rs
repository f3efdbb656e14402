//! The protocol: what the server is, the list of tools, and calls.

use std::sync::Arc;

use box_client::BoxClient;
use box_protocol::{BoxError, BoxId, SpecDraft};
use box_runtime::BoxRuntime;
use box_service::BoxService;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CustomRequest, CustomResult, ErrorCode,
    Implementation, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig,
    Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt as _};

use super::answer::result_of;
use super::follow::Progress;
use super::running::RunningCall;
use super::session::Session;
use super::stdio::Stdio;
use super::tools::{Entry, tools_of};
use crate::target::DefaultBox;

/// What a model reads before it uses the tools.
const INSTRUCTIONS: &str = "\
Boxes are isolated Linux sandboxes. A call without `box` uses your default box, which the first call creates; its files stay \
while you use it. Use run for shell commands, and run_code for Python or JavaScript with state. A command that takes longer than \
wait_s keeps running: read on with read_output, and end it with stop. Output over 30,000 bytes is cut in the middle; read_output \
reads the rest from the byte offset in the answer. Before a risky change, save a checkpoint; rollback restores it. fork copies a \
box to try several ways. A box has no network unless the operator or create_box gives it one.";

/// The server of one client.
#[derive(Debug, Clone)]
pub(super) struct McpServer {
    session: Session,
    /// The call of this request, if another request can cancel it.
    call: Option<Arc<RunningCall>>,
}

impl McpServer {
    pub(super) fn new(session: Session, call: Option<Arc<RunningCall>>) -> Self {
        Self { session, call }
    }

    /// Returns once another request has cancelled the call.
    async fn cancelled(&self) {
        match &self.call {
            Some(call) => call.cancelled().await,
            None => std::future::pending().await,
        }
    }

    fn tool(&self, name: &str) -> Option<&'static Entry> {
        tools_of(&self.session).find(|entry| entry.tool.name == name)
    }
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().build();
        let server = Implementation::new("box", env!("CARGO_PKG_VERSION")).with_title("Box");
        ServerConfig::new(capabilities)
            .with_server_info(server)
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools = tools_of(&self.session).map(|entry| entry.tool.clone());
        let tools = tools.collect();
        Ok(ListToolsResult::with_all_items(tools))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tool(name).map(|entry| entry.tool.clone())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(entry) = self.tool(&request.name) else {
            let message = format!("unknown tool {:?}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        };
        let token = context.meta.get_progress_token();
        let progress = Progress::default();
        let arguments = request.arguments.unwrap_or_default();
        let session = self.session.for_call();
        let call = (entry.call)(session.clone(), arguments, progress.clone());
        // Dropping the call kills the command that it waits for.
        let answered = tokio::select! {
            answered = call => answered,
            () = context.ct.cancelled() => Err(BoxError::cancelled("the client cancelled the call")),
            never = progress.report(context.peer.clone(), token) => match never {},
            () = self.cancelled() => Err(BoxError::cancelled("the client cancelled the call")),
        };
        Ok(result_of(answered, &session).into())
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        // A known method with other parameters arrives here.
        if request.method == "tools/call" {
            let message = "params: need `name`, a string, and `arguments`, an object";
            return Err(ErrorData::invalid_params(message, None));
        }
        let method = request.method;
        Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, method, None))
    }
}

/// Serves the parent process over standard input and output, until it closes one of them.
///
/// Calls without a box use the one with this spec; the first of them creates it.
pub async fn serve_stdio(
    policy: BoxService,
    runtime: BoxRuntime,
    default: BoxId,
    spec: SpecDraft,
) -> Result<(), BoxError> {
    let default = DefaultBox {
        id: default,
        spec: Some(Box::new(spec)),
    };
    serve_parent(Session::of_parent(policy, runtime, default)).await
}

/// Serves the parent process over standard input and output with the boxes of a server.
///
/// Calls without a box use the one with this spec; the first of them creates it if the server does not have it.
pub async fn serve_stdio_for(
    client: BoxClient,
    default: BoxId,
    spec: SpecDraft,
) -> Result<(), BoxError> {
    let default = DefaultBox {
        id: default,
        spec: Some(Box::new(spec)),
    };
    serve_parent(Session::of_client(client, default)).await
}

async fn serve_parent(session: Session) -> Result<(), BoxError> {
    let server = McpServer::new(session, None);
    let failed = |error: String| BoxError::internal(format!("mcp: {error}"));
    let running = match server.serve(Stdio::new()).await {
        Ok(running) => running,
        Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
        Err(error) => return Err(failed(error.to_string())),
    };
    let ended = running.waiting().await;
    ended.map(drop).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instructions_are_short() {
        assert!(INSTRUCTIONS.len() < 800, "{}", INSTRUCTIONS.len());
    }
}
