//! Messages over the standard streams of a process, newline framed.
//!
//! [`serve`] is the child's side. It takes both descriptors, points fd 0 at `/dev/null` and fd 1 at standard error. A
//! stray `println!` of a library therefore cannot break the protocol. [`spawn`] is the parent's side. It starts a
//! command in a separate process group and always ends the whole group.
//!
//! The parent skips lines that are not of the form `{…}` or `[…]`: a library of the child has printed them.
//!
//! ```no_run
//! use box_rpc::{Connection, Limits};
//! use box_transports::stdio;
//! use tokio::process::Command;
//!
//! # async fn example() -> Result<(), box_rpc::ConnectionError> {
//! let child = stdio::spawn(Command::new("boxd"), &Limits::default())?;
//! let (mut send, mut receive) = Box::new(child).split();
//! send.send("{}".to_owned()).await?;
//! send.flush().await?;
//! let answer = receive.receive().await?;
//! // Ends the command, and everything it started.
//! send.close().await?;
//! # let _ = answer;
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: this file, `serve` with `thread_pipe`, `spawn` with `group`.

mod group;
mod serve;
mod spawn;
#[cfg(test)]
mod tests;
mod thread_pipe;

pub use self::{
    serve::{ParentConnection, serve},
    spawn::{Child, spawn},
};
