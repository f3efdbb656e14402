//! Every action of the contract, with its parameters, its result and its chunks.
//!
//! The noun comes first: `box.create`, `command.start`, `file.read`. The action `box.create` has
//! the type [`BoxCreate`], the parameters [`BoxCreateParams`] and, unless it returns a shared type,
//! a `BoxCreateResult`. Parameters reject unknown members. Results and chunks may grow, and a
//! reader ignores unknown members.
//!
//! Any action may return `validation`, `denied`, `overloaded`, `cancelled` and `internal`; the
//! other errors are listed at each action. `hello`, the first call on a connection that requires a
//! token, belongs to the `rpc` engine.

mod agent;
mod agent_ends;
mod agent_files;
mod agent_output;
mod agent_start;
mod boxes;
mod catalog;
mod changes;
mod commands;
mod file_search;
mod files;
mod images;
mod ordering;
mod output;
mod ports;
mod shells;
mod snapshots;
mod system;

pub use agent::*;
pub use agent_ends::*;
pub use agent_files::*;
pub use agent_output::*;
pub use agent_start::*;
pub use boxes::*;
pub use catalog::*;
pub use changes::*;
pub use commands::*;
pub use file_search::*;
pub use files::*;
pub use images::*;
pub use ordering::{OrderKey, Ordered};
pub use output::*;
pub use ports::*;
pub use shells::*;
pub use snapshots::*;
pub use system::*;

/// Declares actions: `Type = "name": Params => Result;`, with `| Chunk` if the action streams.
macro_rules! actions {
    ($($(#[doc = $doc:literal])* $action:ident = $name:literal: $params:ty => $result:ty $(| $chunk:ty)?;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $action;

        impl box_rpc::Action for $action {
            const NAME: &'static str = $name;
            type Params = $params;
            type Result = $result;
            type Chunk = actions!(@chunk $($chunk)?);
        }

        #[cfg(feature = "schema")]
        impl $crate::schema::Described for $action {
            fn describe(
                generator: &mut schemars::SchemaGenerator,
            ) -> $crate::schema::ActionSchema {
                $crate::schema::ActionSchema {
                    name: <Self as box_rpc::Action>::NAME,
                    doc: concat!($($doc, "\n"),*),
                    params: generator.subschema_for::<$params>(),
                    result: generator.subschema_for::<$result>(),
                    chunk: actions!(@schema generator $($chunk)?),
                }
            }
        }
    )*};
    (@chunk) => { box_rpc::Never };
    (@chunk $chunk:ty) => { $chunk };
    (@schema $generator:ident) => { None };
    (@schema $generator:ident $chunk:ty) => { Some($generator.subschema_for::<$chunk>()) };
}
pub(crate) use actions;

/// Whether a member has its default value and can be left out of the message.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Declares a list of action names and the list of their schema functions.
macro_rules! names {
    ($($(#[$doc:meta])* $names:ident, $schemas:ident: $($action:ident)*;)*) => {$(
        $(#[$doc])*
        pub const $names: &[&str] = &[$(<$action as box_rpc::Action>::NAME),*];

        #[cfg(feature = "schema")]
        pub(crate) const $schemas: &[crate::schema::Describe] =
            &[$(<$action as crate::schema::Described>::describe),*];
    )*};
}

names! {
    /// The actions that a host may call, except `hello`.
    ALL_ACTIONS, ALL_SCHEMAS:
    SystemHealth SystemStatus SystemConfigure SystemShutdown
    BoxCreate BoxGet BoxList BoxUpdate BoxTransition BoxDelete BoxExec BoxStats BoxEvents
    BoxDiff BoxApply BoxDiscard
    BoxSnapshot BoxFork BoxCheckpoint BoxRollback SnapshotExport
    CommandStart CommandAttach CommandGet CommandList CommandInput CommandKill
    ShellCreate ShellRun ShellList ShellDelete
    FileRead FileWrite FileStat FileList FileFind FileGrep FileReplace FileMove FileRemove FileMkdir
    FileAttributes FileWatch FilePack FileUnpack
    PortOpen PortSend PortShare
    CatalogPut CatalogGet CatalogList CatalogUpdate CatalogDelete
    ImagePull ImageImport ImageExport ImageList ImageGet ImageRemove ImagePrune ImageLogin ImageLogout;

    /// The actions that a runtime calls on the agent in a box.
    AGENT_ACTIONS, AGENT_SCHEMAS:
    AgentHealth AgentStart AgentOutput AgentList AgentInput AgentKill AgentClear AgentEnds AgentGuest
    AgentDisk AgentAllow AgentRead AgentPack AgentWrite AgentUnpack;
}

#[cfg(test)]
mod tests;
