//! Every action of the contract, each with its parameters, its result and what it streams.
//!
//! The noun comes first: `box.create`, `command.start`, `file.read`. For an action `box.create` there
//! are the type [`BoxCreate`], its [`BoxCreateParams`] and, unless it answers with something shared,
//! its `BoxCreateResult`. Parameters refuse members they do not know; results and chunks may grow, and
//! a reader passes over what is new to it.
//!
//! Any action may answer `validation`, `denied`, `overloaded`, `cancelled` and `internal`; what else
//! it may answer stands at the action. `hello`, the first call on a connection that needs a token,
//! belongs to the engine.

mod agent;
mod agent_ends;
mod agent_files;
mod boxes;
mod commands;
mod file_search;
mod files;
mod named;
mod output;
mod ports;
mod shells;
mod system;

pub use agent::*;
pub use agent_ends::*;
pub use agent_files::*;
pub use boxes::*;
pub use commands::*;
pub use file_search::*;
pub use files::*;
pub use named::{Named, Names};
pub use output::*;
pub use ports::*;
pub use shells::*;
pub use system::*;

/// Declares actions: `Type = "name": Params => Result;`, with `| Chunk` if it streams.
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

/// What is as it would be if it were not written is not written: most messages of a short exec are
/// made of such members.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Declares a list of the names of actions, and one of what tells their schemas.
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
    /// The contract a host sees, `hello` apart.
    ALL_ACTIONS, ALL_SCHEMAS:
    SystemHealth SystemStatus SystemConfigure SystemShutdown
    BoxCreate BoxGet BoxList BoxUpdate BoxTransition BoxDelete BoxExec BoxStats BoxEvents
    CommandStart CommandAttach CommandGet CommandList CommandInput CommandKill
    ShellCreate ShellRun ShellList ShellDelete
    FileRead FileWrite FileStat FileList FileFind FileGrep FileReplace FileMove FileRemove FileMkdir
    FileAttributes FileWatch FilePack FileUnpack
    PortOpen PortSend PortShare;

    /// What a runtime asks of the agent in a box.
    AGENT_ACTIONS, AGENT_SCHEMAS:
    AgentHealth AgentStart AgentOutput AgentList AgentInput AgentKill AgentClear AgentEnds AgentGuest
    AgentDisk AgentAllow AgentRead AgentPack AgentWrite AgentUnpack;
}

#[cfg(test)]
mod tests;
