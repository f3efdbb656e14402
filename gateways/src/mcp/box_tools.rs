//! The tools that act inside one box, without the protocol, for gateways that have requests of their own for them.

use box_protocol::{BoxId, GatewayName};
use rmcp::model::{CallToolResult, JsonObject, Tool};

use super::answer::result_of;
use super::follow::Progress;
use super::session::Session;
use super::tools::{Entry, tools_of};
use crate::http::context::Context;
use crate::target::DefaultBox;

/// The tools for the commands, code and files of a box.
#[derive(Debug)]
pub(crate) struct BoxTools(Session);

impl BoxTools {
    /// Creates the tools of a box for a request of another gateway, whose policy they follow.
    pub(crate) fn new(context: Context, id: BoxId, gateway: &GatewayName) -> Self {
        let default = DefaultBox { id, spec: None };
        Self(Session::of_request(context, default, gateway))
    }

    /// Lists the tools.
    pub(crate) fn list(&self) -> Vec<Tool> {
        self.entries().map(|entry| entry.tool.clone()).collect()
    }

    fn entries(&self) -> impl Iterator<Item = &'static Entry> {
        tools_of(&self.0).filter(|entry| entry.acts_inside)
    }

    /// Calls a tool; returns `None` if it does not exist. A dropped call is cancelled.
    pub(crate) async fn call(&self, name: &str, arguments: JsonObject) -> Option<CallToolResult> {
        let entry = self.entries().find(|entry| entry.tool.name == name)?;
        let session = self.0.for_call();
        let answered = (entry.call)(session.clone(), arguments, Progress::default()).await;
        Some(result_of(answered, &session))
    }
}
