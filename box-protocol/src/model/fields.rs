//! The fields of a box's spec. A field is declared here and nowhere else.
//!
//! Its row says the name on the wire, the type, the value of a spec whose caller does not ask for one, and the rule. From the
//! rows come [`BoxSpec`](super::BoxSpec), [`SpecDraft`](super::SpecDraft) with its decoder, setters and schema,
//! [`first_conflict`](super::first_conflict), the fixed fields of [`BoxSessionInfo`](super::BoxSessionInfo), and
//! [`BoxProfile`](super::BoxProfile).
//!
//! # A row
//! ```text
//! /// What the field is: for the documentation and for the schema.
//! name: Type = default, rule, fixed shown, lockable Name;
//! ```
//! * `Type` is one word, or in parentheses.
//! * `default` is one word, or in parentheses. `None` makes the field of the spec an `Option`.
//! * `rule` is a [`Rule`] or a function that checks a reference.
//! * `fixed` fields cannot change while a box lives: [`first_conflict`](super::first_conflict) compares them in the order of the
//!   rows, and the info of a box has them. An error says the values if they are `shown`, and does not if they are `hidden`.
//! * `lockable` fields are part of a profile, which gives the default and can lock the field under this name.

pub(super) use super::bounds::{check_defaults, check_guest, check_labels, check_main};
pub(super) use super::mount::{BoxMountSpec, HostPathMode};
pub(super) use super::network::NetworkPolicy;
pub(super) use super::parts::{Defaults, Guest, Labels, Lifetime, Main};
pub(super) use super::rules::{
    Any, AtLeast, Few, HostPath, Inside, Mounts, NoNul, Optional, POSITIVE, Positive, Rule, Secret,
    Word,
};
pub(super) use super::spec::Network;
pub(super) use super::world::World;
pub(super) use crate::env::Env;
pub(super) use crate::ids::Name;
pub(super) use crate::note::Note;

/// Hands the rows to the macro `$then`, after `$first` if that is given.
macro_rules! spec_fields {
    ($then:ident $($first:ident)?) => { $then! { $($first)?
        /// The text to run, for the box's shell; trimmed. `box.exec` needs one.
        cmd: String = (String::new()), NoNul;

        /// Where the text runs: an absolute path; `mount_path` if absent. Under `mount_path` if a host directory is mounted
        /// there.
        workdir: String = (String::new()), Optional(Inside);

        /// How many seconds the text may run.
        timeout_sec: u64 = 30, AtLeast(1, POSITIVE), lockable TimeoutSec;

        /// Whether the box reaches a network.
        network: Network = (Network::Off), Any, fixed shown, lockable Network;

        /// The image that the box's files come from; the machine's own system directories if absent.
        image: String = None, Word, fixed shown, lockable Image;

        /// Environment variables for the text.
        env: Env = (Env::new()), Secret(Any);

        /// The host directory that is the workspace: an absolute path, also one of Windows.
        host_path: String = None, Optional(HostPath), fixed hidden;

        /// How the workspace is mounted.
        host_path_mode: HostPathMode = (HostPathMode::Rw), Any, fixed shown, lockable HostPathMode;

        /// Where the workspace appears: an absolute path.
        mount_path: String = (DEFAULT_MOUNT_PATH.to_owned()), Inside, fixed hidden;

        /// More host directories.
        extra_mounts: (Vec<BoxMountSpec>) = (Vec::new()), Mounts;

        /// Idleness does not end the box.
        persistent: bool = false, Any, fixed shown;

        /// Processors' worth of time.
        cpus: f64 = 1.0, Positive, fixed shown, lockable Cpus;

        /// Memory in mebibytes.
        memory_mb: u64 = 512, AtLeast(32, "must be at least 32"), fixed shown, lockable MemoryMb;

        /// How many processes and threads the box may have.
        pids_limit: u64 = 128, AtLeast(1, "must be at least 1"), fixed shown, lockable PidsLimit;

        /// The system's directories cannot be written.
        read_only_rootfs: bool = true, Any, fixed shown, lockable ReadOnlyRootfs;

        /// How many mebibytes the workspace and every other mount that can be written to may hold; 0 for no limit.
        workspace_quota_mb: u64 = 0, AtLeast(0, "must be greater than or equal to 0"), fixed shown, lockable WorkspaceQuotaMb;

        /// A changeable name, unique in its world. The host name of the box is made of the one it begins with.
        name: Name = None, Any;

        /// Labels to filter by: at most 64, and 16 KiB in all.
        labels: Labels = None, check_labels;

        /// What a gateway keeps with the box.
        note: Note = None, Any;

        /// The protocol the box was made through.
        world: World = None, Any;

        /// When the box ends by itself.
        lifetime: Lifetime = None, Any;

        /// What every command of the box gets.
        defaults: Defaults = None, Secret(check_defaults);

        /// A command started with the box.
        main: Main = None, check_main;

        /// The guest's name and home.
        guest: Guest = None, check_guest;

        /// Directories that exist from the start and belong to the guest.
        dirs: (Vec<String>) = None, Few(Inside);

        /// The hosts that the box may connect to, if it has a network.
        network_policy: (Box<NetworkPolicy>) = None, Any, lockable NetworkPolicy;

        /// Primitives the box may lack (`network`); the answer lists under `degraded` which it does. A quota is
        /// none of them: where no file system keeps it, the workspace is measured.
        best_effort: (Vec<String>) = None, Few(Word);
    }};
}
pub(super) use spec_fields;

/// Hands the rows of the fixed fields to the macro `$then`, as `name: Type = default, shown;`.
macro_rules! fixed_fields {
    ($then:ident $(
        $(#[doc = $doc:literal])*
        $name:ident: $type:tt = $default:tt, $rule:expr $(, fixed $shown:ident)? $(, lockable $lock:ident)?;
    )*) => {
        $then! { $($($name: $type = $default, $shown;)?)* }
    };
}
pub(super) use fixed_fields;

/// Hands the rows of the lockable fields to the macro `$then`, as `name: Type = default, rule, Lock;`.
macro_rules! lockable_fields {
    ($then:ident $(
        $(#[doc = $doc:literal])*
        $name:ident: $type:tt = $default:tt, $rule:expr $(, fixed $shown:ident)? $(, lockable $lock:ident)?;
    )*) => {
        $then! { $($($name: $type = $default, $rule, $lock;)?)* }
    };
}
pub(super) use lockable_fields;

/// The type of a field of a spec.
macro_rules! held {
    ($type:tt, None) => { Option<$type> };
    ($type:tt, $default:tt) => { $type };
}
pub(super) use held;

/// The default of a field, if it has one.
macro_rules! default_of {
    (None) => {
        None
    };
    ($default:tt) => {
        Some($default)
    };
}
pub(super) use default_of;

/// What is asked for, or the default.
macro_rules! or_default {
    ($asked:expr, None) => {
        $asked
    };
    ($asked:expr, $default:tt) => {
        $asked.unwrap_or_else(|| $default)
    };
}
pub(super) use or_default;
