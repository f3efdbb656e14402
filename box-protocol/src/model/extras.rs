//! What a spec may say beyond LangBot's fields. All optional; none is compared when a box is reused.

use std::collections::BTreeMap;

use serde::de::MapAccess;
use serde::{Deserialize, Serialize};

use super::network::NetworkPolicy;
use crate::decode::put;
use crate::env::Env;
use crate::ids::Name;
use crate::invalid::Invalid;
use crate::note::Note;
use crate::paths;
use crate::time::UnixMs;

/// Visible, filterable marks of a record.
pub type Labels = BTreeMap<String, String>;

/// The members of a spec beyond LangBot's.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SpecExtras {
    /// A changeable name, unique in its world. The host name of the box is made of the one it begins with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Marks to filter by: at most 64, and 16 KiB in all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<Labels>,
    /// What a gateway keeps with the box.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// The protocol the box was made through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world: Option<World>,
    /// When the box ends by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Lifetime>,
    /// What every command of the box gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub defaults: Option<Defaults>,
    /// A command started with the box.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main: Option<Main>,
    /// Who the guest is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<Guest>,
    /// Directories that exist from the start and belong to the guest.
    #[cfg_attr(feature = "schema", schemars(length(max = 64), inner(regex(pattern = crate::schema::INSIDE))))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirs: Option<Vec<String>>,
    /// To whom the box may connect, if it has a network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<Box<NetworkPolicy>>,
    /// Primitives the box may lack (`network`); the answer lists under `degraded` which it does. A quota is
    /// none of them: where no file system keeps it, the workspace is measured.
    #[cfg_attr(feature = "schema", schemars(length(max = 64)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_effort: Option<Vec<String>>,
}

impl SpecExtras {
    /// Reads the member `name`, if it is one of these.
    pub(crate) fn take<'de, A: MapAccess<'de>>(
        &mut self,
        name: &str,
        map: &mut A,
    ) -> Result<bool, A::Error> {
        match name {
            "name" => put(&mut self.name, map, "name")?,
            "labels" => put(&mut self.labels, map, "labels")?,
            "note" => put(&mut self.note, map, "note")?,
            "world" => put(&mut self.world, map, "world")?,
            "lifetime" => put(&mut self.lifetime, map, "lifetime")?,
            "defaults" => put(&mut self.defaults, map, "defaults")?,
            "main" => put(&mut self.main, map, "main")?,
            "guest" => put(&mut self.guest, map, "guest")?,
            "dirs" => put(&mut self.dirs, map, "dirs")?,
            "network_policy" => put(&mut self.network_policy, map, "network_policy")?,
            "best_effort" => put(&mut self.best_effort, map, "best_effort")?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn check(&self) -> Result<(), Invalid> {
        super::bounds::check(self)?;
        for dir in self.dirs.iter().flatten() {
            paths::inside("dirs", dir)?;
        }
        if let Some(cwd) = self
            .defaults
            .as_ref()
            .and_then(|defaults| defaults.cwd.as_ref())
        {
            paths::inside("defaults", cwd)?;
        }
        if let Some(guest) = &self.guest {
            paths::inside("guest", &guest.home)?;
        }
        if self.main.as_ref().is_some_and(|main| main.argv.is_empty()) {
            return Err(Invalid::new("main", "must have an argv that is not empty"));
        }
        Ok(())
    }
}

/// The protocol a box was made through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum World {
    /// Our own contract.
    #[default]
    Native,
    /// LangBot's frames.
    LangBot,
}

/// When a box ends by itself. `persistent` in the spec wins over `idle_ms`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Lifetime {
    /// At this time, whatever it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<UnixMs>,
    /// After so long without work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// What idleness does.
    pub on_idle: OnIdle,
    /// So long after it was stopped, it is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_after_stop_ms: Option<u64>,
    /// A call to a paused or stopped box wakes it first.
    pub wake: bool,
}

/// What becomes of an idle box.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnIdle {
    /// It is deleted.
    #[default]
    Delete,
    /// It is stopped: processes end, files stay.
    Stop,
}

/// What every command of a box gets unless it says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Variables, 128 KiB in all.
    pub env: Env,
    /// A file in the box with more variables, over those: read, as the guest, before each exec and
    /// command and before a shell is made, as [`Env::from_lines`](crate::Env::from_lines) says; at most
    /// 64 KiB. `~` and `$VAR` are taken. Without the file there are none; what is there and is no file
    /// that can be read is an error of whoever starts something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_file: Option<String>,
    /// The working directory.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::INSIDE)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The user, by name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The shell that runs texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
}

/// A command started with the box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Main {
    /// Program and arguments.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 1024)))]
    pub argv: Vec<String>,
    /// The box ends with it.
    #[serde(default)]
    pub ends_box: bool,
}

/// The guest in the box's own list of users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Guest {
    /// The user's name.
    pub name: String,
    /// The home directory.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::INSIDE)))]
    pub home: String,
}
