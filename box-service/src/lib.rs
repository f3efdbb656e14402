//! Policy layer of Box: decides which box and settings a caller may have.
//!
//! It reaches a runtime only through the contract, in process or over any transport.
//!
//! # Reading order
//! 1. `policy.rs`: [`decide`](policy::decide), the only function that accepts or refuses a request. It is pure;
//!    [`PolicyInputs`](policy::PolicyInputs) holds all values that needed a lookup.
//! 2. `blocked.rs`: host paths that are never mounted. `paths.rs`: resolution of host paths. `quota.rs`: size limit
//!    of a workspace.
//! 3. `service.rs`: [`BoxService`], its rules and its connections. `config.rs`: [`ServiceConfig`], from which the
//!    rules are built.
//! 4. `handlers.rs`: [`BoxService::router`], which applies policy to some actions and forwards the rest.
//! 5. `run.rs`: timeout, quota, output and audit log of `box.exec`, `command.start` and `shell.run`.
//! 6. `execute.rs`: the tool interface, such as [`execute_tool`](BoxService::execute_tool), and requests that need a
//!    decision. `session_id.rs` chooses the box of a tool call, `truncate.rs` and `status.rs` shape its result.
//!    `pools.rs` decides the specs of pools.
//! 7. `gateway.rs`: decisions for gateways that call the runtime themselves, and the calls of each token.
//! 8. `connector.rs` and `client.rs`: [`Connector`] and [`RuntimeClient`], the connection to the runtime.
//! 9. `errors.rs`: recent errors. `audit.rs`: audit log of decisions.
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
mod gateway;
mod handlers;
pub mod paths;
pub mod policy;
mod pools;
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
pub use gateway::CallGuard;
pub use service::{BoxService, blocking};
pub use session_id::{DEFAULT_SESSION_ID_TEMPLATE, Query, SessionIdTemplate};
pub use status::{ServiceStatus, ToolResult};
pub use truncate::DEFAULT_OUTPUT_LIMIT_CHARS;
