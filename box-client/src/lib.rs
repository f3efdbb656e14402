//! The Rust client of Box.
//!
//! ```no_run
//! use box_client::{BoxClient, ClientOptions, SpecDraft};
//! use futures::StreamExt as _;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = BoxClient::connect("unix:/run/boxd.sock".parse()?, ClientOptions::default()).await?;
//! let work = client.get_or_create(SpecDraft::new("job-1")).await?;
//!
//! let tests = work.run("make test").cwd("/workspace").await?;
//! println!("{:?}: {}", tests.exit_code(), tests.stdout_text());
//!
//! let mut build = work.command("make").detached().id("build-7").start().await?;
//! while let Some(chunk) = build.next().await.transpose()? {
//!     print!("{}", chunk.text());
//! }
//! println!("{:?}", build.exit().await?);
//! # Ok(())
//! # }
//! ```
//!
//! # In one process
//!
//! An endpoint can be a queue inside the process with its own runtime. This example uses scripted
//! boxes, as the tests of a plugin would.
//!
//! ```
//! use box_client::{BoxClient, ClientOptions, Endpoint, SpecDraft};
//! use box_runtime::{BoxRuntime, RuntimeConfig, fake::FakeBackend};
//! use box_transports::{ListenOptions, server::Server};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let endpoint: Endpoint = "queue:boxes".parse()?;
//! let runtime = BoxRuntime::start(RuntimeConfig::with(FakeBackend::new()));
//! let listener = endpoint.listen(&ListenOptions::default()).await?;
//! let _server = Server::start(listener, runtime.router(), |_| box_rpc::Options::new(box_rpc::Caller::Local));
//!
//! let client = BoxClient::connect(endpoint, ClientOptions::default()).await?;
//! let ran = client.exec(SpecDraft::new("job-1").cmd("echo hello")).await?;
//! assert_eq!(ran.stdout_text(), "executed: echo hello");
//!
//! let work = client.open("job-1").await?;
//! work.delete().await?;
//! assert!(client.open("job-1").await.unwrap_err().is_not_found());
//! # Ok(())
//! # }
//! ```
//!
//! The methods correspond to the actions of the contract in [`box_protocol`], which describes their
//! parameters and errors. Handles are cheap to clone. Dropping a future cancels its call. The client
//! validates parameters before it sends them.
//!
//! # Reading order
//!
//! 1. [`BoxClient`] (`client`), [`ClientOptions`]: the connection to a server, and calls to the server
//!    as a whole.
//! 2. [`BoxHandle`] (`handle`): a box and the operations on it.
//! 3. [`CommandBuilder`], [`CommandHandle`] (`command`): a command, read across lost connections.
//!    [`Chunk`] and [`Output`] (`chunk`): its output.
//! 4. [`reconnect`]: when the client resumes reading a command, as a pure state machine.
//! 5. [`ShellHandle`] (`shell`): one request at a time in a shell, which is replaced once if it is lost.
//! 6. [`Files`] (`files`), [`PortStream`] (`port`): files and network connections.
//! 7. [`Execution`] (`execution`): a run as messages, also from OpenSandbox's event stream.
//!    `changes`: what a box has changed.
//! 8. `catalog`: items that outlive boxes, such as volumes and pools. [`Images`] (`images`): the images of the
//!    server.
//! 9. [`ClientError`] (`error`): errors of the client.

mod catalog;
mod changes;
mod chunk;
mod client;
mod command;
mod error;
mod execution;
mod files;
mod handle;
mod images;
mod options;
mod port;
pub mod reconnect;
mod shell;
mod snapshots;
mod unread;

pub use box_protocol::actions::{
    BoxApplyResult, BoxListParams, CatalogListParams, CatalogPutParams, CatalogUpdateParams,
    DiffEntry, DiffKind, Displayed, FileKind, FilePart, FileStatInfo, Language, ReadWhy,
    StreamName, View,
};
pub use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, PoolChange, PoolContent,
    PoolDraft, TemplateDraft, VolumeChange, VolumeDraft,
};
pub use box_protocol::{
    BoxError, Code, Exit, ExitWhy, Network, NetworkPolicy, NetworkRule, PullPolicy, SpecDraft,
};
pub use box_transports::Endpoint;
pub use changes::ApplyOptions;
pub use chunk::{Chunk, Offsets, Output};
pub use client::BoxClient;
pub use command::{
    CommandBuilder, CommandControl, CommandHandle, DEFAULT_CAPTURE_LIMIT, DEFAULT_IDLE_LIMIT,
};
pub use error::{ClientError, ConnectFailure};
pub use execution::{Execution, ExecutionReader, MAX_EVENT_BYTES, Message};
pub use files::{FileReader, FileWriter, Files, MAX_READ_BYTES, PIECE_BYTES};
pub use handle::BoxHandle;
pub use images::Images;
pub use options::ClientOptions;
pub use port::PortStream;
pub use shell::{
    DEFAULT_DOWNLOAD_ROOT, DEFAULT_SILENCE_LIMIT, Replaced, ShellBuilder, ShellHandle,
    ShellRunBuilder,
};
