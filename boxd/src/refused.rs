//! Prints the refused connections of a box while a command runs.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use box_client::{BoxHandle, Network};
use box_protocol::UnixMs;
use box_protocol::actions::RefusedConnection;
use serde_json::json;

use crate::output;

/// The interval between two checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// A destination, and the reason of the refusal.
type Key = (String, String);

/// The refusals before the command, and those already printed.
pub(crate) struct RefusalWatch<'a> {
    handle: &'a BoxHandle,
    before: HashMap<Key, UnixMs>,
    printed: HashSet<Key>,
    json: bool,
}

impl<'a> RefusalWatch<'a> {
    /// Watches from now on; `None` if the box has no network.
    pub(crate) async fn start(handle: &'a BoxHandle, json: bool) -> Option<Self> {
        if handle.network() == Network::Off {
            return None;
        }
        let mut refused = Self {
            handle,
            before: HashMap::new(),
            printed: HashSet::new(),
            json,
        };
        if handle.existed() {
            let before = refused.list().await.into_iter();
            refused.before = before.map(|refused| (key(&refused), refused.at)).collect();
        }
        Some(refused)
    }

    /// Prints each new destination once, until dropped.
    pub(crate) async fn watch(&mut self) -> ! {
        loop {
            tokio::time::sleep(INTERVAL).await;
            self.print_new().await;
        }
    }

    /// Prints each destination that was not printed yet.
    pub(crate) async fn print_new(&mut self) {
        for refused in self.list().await {
            let key = key(&refused);
            if self.before.get(&key) != Some(&refused.at) && self.printed.insert(key) {
                print(&refused, self.json);
            }
        }
    }

    /// The refused destinations; none if the box or the server is gone.
    async fn list(&self) -> Vec<RefusedConnection> {
        let stats = self.handle.stats().await;
        stats.map_or_else(|_| Vec::new(), |stats| stats.network_refused_to)
    }
}

fn key(refused: &RefusedConnection) -> Key {
    (refused.to.clone(), refused.why.clone())
}

fn print(refused: &RefusedConnection, json: bool) {
    if json {
        return output::eprintln(&json!({ "refused": refused }).to_string());
    }
    let to = output::visible(&refused.to);
    output::eprintln(&format!(
        "boxd: refused {to} ({})",
        explanation(&refused.why)
    ));
}

/// The explanation of a reason, with the setting that changes it.
fn explanation(reason: &str) -> &str {
    match reason {
        "unlisted" => "not in --allow",
        "denied" => "denied by the box's network policy",
        "operator_unlisted" => "not in network.allow of the configuration",
        "operator_denied" => "in network.deny of the configuration",
        "not_public" => {
            "not a public address; list it with --allow ADDRESS, or in network.allow of a server"
        }
        "own_machine" => {
            "an address of this machine; list it with --allow ADDRESS, or in network.allow of a server"
        }
        "limit_connections" => "the box reached network.connections",
        "limit_bytes" => "the box reached network.bytes_per_box",
        "proxy" => "the configured proxy did not connect",
        other => other,
    }
}
