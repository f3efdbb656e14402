//! Prints the refused connections of a box while a command runs.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use box_client::{BoxHandle, Network};
use box_protocol::UnixMs;
use box_protocol::actions::RefusedConnection;
use serde_json::json;

use crate::output;

/// The interval between two checks.
const EVERY: Duration = Duration::from_secs(1);

/// A destination, and the reason of the refusal.
type Key = (String, String);

/// The refusals before the command, and those already printed.
pub(crate) struct Refused<'a> {
    there: &'a BoxHandle,
    before: HashMap<Key, UnixMs>,
    told: HashSet<Key>,
    json: bool,
}

impl<'a> Refused<'a> {
    /// Watches from now on; `None` if the box has no network.
    pub(crate) async fn from_now(there: &'a BoxHandle, json: bool) -> Option<Self> {
        if there.network() == Network::Off {
            return None;
        }
        let mut refused = Self {
            there,
            before: HashMap::new(),
            told: HashSet::new(),
            json,
        };
        if there.existed() {
            let before = refused.list().await.into_iter();
            refused.before = before.map(|refused| (key(&refused), refused.at)).collect();
        }
        Some(refused)
    }

    /// Prints each new destination once, until dropped.
    pub(crate) async fn watch(&mut self) -> ! {
        loop {
            tokio::time::sleep(EVERY).await;
            self.tell().await;
        }
    }

    /// Prints each destination that was not printed yet.
    pub(crate) async fn tell(&mut self) {
        for refused in self.list().await {
            let key = key(&refused);
            if self.before.get(&key) != Some(&refused.at) && self.told.insert(key) {
                say(&refused, self.json);
            }
        }
    }

    /// The refused destinations; none if the box or the server is gone.
    async fn list(&self) -> Vec<RefusedConnection> {
        let stats = self.there.stats().await;
        stats.map_or_else(|_| Vec::new(), |stats| stats.network_refused_to)
    }
}

fn key(refused: &RefusedConnection) -> Key {
    (refused.to.clone(), refused.why.clone())
}

fn say(refused: &RefusedConnection, json: bool) {
    if json {
        return output::complain(&json!({ "refused": refused }).to_string());
    }
    let to = output::visible(&refused.to);
    output::complain(&format!("boxd: refused {to} ({})", words(&refused.why)));
}

/// The explanation of a reason, with the setting that changes it.
fn words(why: &str) -> &str {
    match why {
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
