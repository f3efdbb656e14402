//! The policy layer of Box: what a caller may have, in which box, and what is told of it. It reaches a
//! runtime only through the contract, in process or over any transport.
//!
//! # Reading order
//! 1. [`policy`]: [`decide`](policy::decide), the one place that says yes or no. Pure; what had to be
//!    looked up is a [`Facts`](policy::Facts). `blocked` lists what is never mounted.
//! 2. [`paths`]: where a host path really leads. [`quota`]: how much a workspace may hold.
//! 3. `run`: time, quota, output and audit log of everything that runs, `box.exec`, `command.start` and
//!    `shell.run` alike.
//! 4. [`BoxService`]: [`execute_tool`](BoxService::execute_tool) and the other methods of `execute`, from
//!    request to result; `session_id` names the box, [`mod@truncate`] shortens the output, `errors`
//!    remembers what failed, `audit` logs it.
//! 5. [`RuntimeClient`] and [`Connector`]: how the runtime is reached.
//! 6. `handlers`: [`BoxService::router`], the contract again, with policy in front.
//! 7. [`ServiceConfig`]: what an operator can say.
//!
//! # Example
//! ```
//! use box_rpc::Router;
//! use box_service::{BoxService, Query, ServiceConfig, connector::InProcess};
//! use serde_json::json;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), box_protocol::BoxError> {
//! // A runtime's router belongs here; this one serves nothing.
//! let runtime = InProcess::new(Router::empty());
//! let service = BoxService::with_connector(ServiceConfig::default(), runtime)?;
//! service.initialize().await?;
//!
//! let parameters = json!({"command": "echo hi"}).as_object().cloned().unwrap_or_default();
//! let query = Query::new(42).from_launcher("person", "ann");
//! let refused = service.execute_tool(parameters, &query).await.unwrap_err();
//! assert_eq!(refused.code(), box_protocol::Code::Unsupported);
//! assert_eq!(service.recent_errors()[0].query_id.as_deref(), Some("42"));
//! # Ok(())
//! # }
//! ```

mod audit;
pub mod blocked;
mod client;
mod config;
pub mod connector;
mod errors;
mod execute;
mod handlers;
pub mod paths;
pub mod policy;
pub mod quota;
mod run;
mod service;
mod session_id;
mod status;
pub mod truncate;

pub use client::RuntimeClient;
pub use config::ServiceConfig;
pub use connector::Connector;
pub use errors::RECENT_ERRORS;
pub use execute::draft_with_session_id;
pub use service::{BoxService, blocking};
pub use session_id::{DEFAULT_SESSION_ID_TEMPLATE, Query, SessionIdTemplate};
pub use status::{ServiceStatus, ToolResult};
pub use truncate::DEFAULT_OUTPUT_LIMIT_CHARS;
