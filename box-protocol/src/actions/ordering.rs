//! The objects in a box that a call refers to, as ordering keys.
//!
//! Calls of one connection that refer to the same object take effect in the order in which the
//! client sent them. The runtime and the agent queue concurrent calls by these keys.

use super::{
    AgentInputParams, AgentKillParams, AgentListParams, AgentOutputParams, AgentStartParams,
    CommandAttachParams, CommandInputParams, CommandKey, CommandKillParams, CommandStartParams,
    FileAttributesParams, FileFindParams, FileGrepParams, FileListParams, FileMkdirParams,
    FileMoveParams, FilePackParams, FileReadParams, FileRemoveParams, FileReplaceParams,
    FileStatParams, FileUnpackParams, FileWatchParams, FileWriteParams, PortOpenParams,
    PortSendParams, ShellCreateParams, ShellDeleteParams, ShellListParams, ShellRunParams,
};
use crate::ids::{CommandId, ConnId, ShellId};
use crate::model::Role;

/// An object in a box.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OrderKey {
    /// A command, by its id.
    Command(CommandId),
    /// A shell, by its id.
    Shell(ShellId),
    /// A connection to a port.
    Connection(ConnId),
    /// A file or directory, by its path as the client wrote it.
    File(String),
}

/// The parameters of a call that may refer to objects in a box.
pub trait Ordered {
    /// The objects that the call refers to; empty if its order does not matter.
    fn order_keys(&self) -> Vec<OrderKey>;

    /// Whether the call changes none of its objects.
    fn is_read_only(&self) -> bool {
        false
    }
}

fn command(id: &CommandId) -> OrderKey {
    OrderKey::Command(id.clone())
}

fn shell(id: &ShellId) -> OrderKey {
    OrderKey::Shell(id.clone())
}

fn file(path: &str) -> OrderKey {
    OrderKey::File(path.to_owned())
}

macro_rules! ordered {
    ($read_only:literal: $($params:ty: $it:ident => $keys:expr;)*) => {$(
        impl Ordered for $params {
            fn order_keys(&self) -> Vec<OrderKey> {
                let $it = self;
                $keys
            }

            fn is_read_only(&self) -> bool {
                $read_only
            }
        }
    )*};
}

ordered! { true:
    CommandAttachParams: it => vec![command(&it.command_id)];
    CommandKey: it => vec![command(&it.command_id)];
    ShellListParams: it => it.shell_id.iter().map(shell).collect();
    FileReadParams: it => vec![file(&it.path)];
    FileStatParams: it => it.paths.iter().map(|path| file(path)).collect();
    FileListParams: it => vec![file(&it.path)];
    FileFindParams: it => vec![file(&it.path)];
    FileGrepParams: it => vec![file(&it.path)];
    FilePackParams: it => vec![file(&it.path)];
    PortOpenParams: _it => Vec::new();
    AgentOutputParams: it => vec![command(&it.command_id)];
    AgentListParams: it => it.command_id.iter().map(command).collect();
}

ordered! { false:
    CommandStartParams: it => it.command_id.iter().map(command).collect();
    CommandInputParams: it => vec![command(&it.command_id)];
    CommandKillParams: it => vec![command(&it.command_id)];
    ShellCreateParams: it => it.shell_id.iter().map(shell).collect();
    ShellRunParams: it => {
        let run = it.command_id.iter().map(command);
        run.chain([shell(&it.shell_id)]).collect()
    };
    ShellDeleteParams: it => vec![shell(&it.shell_id)];
    FileReplaceParams: it => vec![file(&it.path)];
    FileMoveParams: it => vec![file(&it.src), file(&it.dest)];
    FileRemoveParams: it => it.paths.iter().map(|path| file(path)).collect();
    FileMkdirParams: it => vec![file(&it.path)];
    FileAttributesParams: it => vec![file(&it.path)];
    FileWatchParams: it => {
        let watch = it.command_id.iter().map(command);
        watch.chain([file(&it.path)]).collect()
    };
    // The pieces of an upload carry their own order.
    FileWriteParams: it => it.upload.is_none().then(|| file(&it.path)).into_iter().collect();
    FileUnpackParams: _it => Vec::new();
    PortSendParams: it => vec![OrderKey::Connection(it.conn_id.clone())];
    AgentInputParams: it => vec![command(&it.command_id)];
    AgentKillParams: it => vec![command(&it.command_id)];
    AgentStartParams: it => {
        // The id of an exec is generated, therefore no other call can refer to it.
        let own = (it.role != Role::Exec).then(|| command(&it.command_id));
        let watched = it.watch.iter().map(|watch| file(&watch.path));
        let shell = it.shell_id.iter().map(shell);
        own.into_iter().chain(shell).chain(watched).collect()
    };
}
