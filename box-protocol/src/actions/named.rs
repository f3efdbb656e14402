//! What in a box a call names. Calls of one connection that name the same thing take effect in the order in which they were
//! sent; the places that would lose that order, in the runtime and in the agent, keep it by this.

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

/// Something in a box.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Named {
    /// A command, by its id.
    Command(CommandId),
    /// A shell, by its id.
    Shell(ShellId),
    /// A connection to a port.
    Connection(ConnId),
    /// A file or directory, by its path as it is written.
    File(String),
}

/// The parameters of a call that may name something.
pub trait Names {
    /// What it names; nothing if its order does not matter.
    fn names(&self) -> Vec<Named>;

    /// Whether it changes nothing of what it names.
    fn only_looks(&self) -> bool {
        false
    }
}

fn command(id: &CommandId) -> Named {
    Named::Command(id.clone())
}

fn shell(id: &ShellId) -> Named {
    Named::Shell(id.clone())
}

fn file(path: &str) -> Named {
    Named::File(path.to_owned())
}

macro_rules! names {
    ($looks:literal: $($params:ty: $it:ident => $names:expr;)*) => {$(
        impl Names for $params {
            fn names(&self) -> Vec<Named> {
                let $it = self;
                $names
            }

            fn only_looks(&self) -> bool {
                $looks
            }
        }
    )*};
}

names! { true:
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

names! { false:
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
    // The pieces of an upload have an order of their own.
    FileWriteParams: it => it.upload.is_none().then(|| file(&it.path)).into_iter().collect();
    FileUnpackParams: _it => Vec::new();
    PortSendParams: it => vec![Named::Connection(it.conn_id.clone())];
    AgentInputParams: it => vec![command(&it.command_id)];
    AgentKillParams: it => vec![command(&it.command_id)];
    AgentStartParams: it => {
        // The id of an exec is made up for it: it names nothing that another call could.
        let own = (it.role != Role::Exec).then(|| command(&it.command_id));
        let watched = it.watch.iter().map(|watch| file(&watch.path));
        let shell = it.shell_id.iter().map(shell);
        own.into_iter().chain(shell).chain(watched).collect()
    };
}
