//! The fields of a spec. This module is the only place that declares a field.
//!
//! A row has the name on the wire, the type, the default and the rule. The macros generate from the
//! rows: [`BoxSpec`](super::BoxSpec), [`SpecDraft`](super::SpecDraft) with its decoder, setters and schema,
//! [`first_conflict`](super::first_conflict), the fixed fields of [`BoxInfo`](super::BoxInfo), and
//! [`BoxProfile`](super::BoxProfile).
//!
//! # A row
//! ```text
//! /// The description for the documentation and the schema.
//! name: Type = default, rule, fixed shown, lockable Name;
//! ```
//! * `Type` is one word, or in parentheses.
//! * `default` is one word, or in parentheses. `None` makes the field of the spec an `Option`.
//! * `rule` is a [`Rule`] or a function that checks a reference.
//! * `fixed` fields cannot change during the life of a box: [`first_conflict`](super::first_conflict) compares them in the order of the
//!   rows, and the record of a box has them. An error contains `shown` values and omits `hidden` ones.
//! * `lockable` fields are part of a profile, which sets the default and can lock the field under this name.

pub(super) use super::bounds::{
    check_defaults, check_guest, check_labels, check_main, check_prepare,
};
pub(super) use super::gateway_name::GatewayName;
pub(super) use super::mount::{BoxMountSpec, HostPathMode};
pub(super) use super::network::NetworkPolicy;
pub(super) use super::parts::{Defaults, Guest, Labels, Lifetime, Main, Prepare, PullPolicy};
pub(super) use super::rules::{
    Any, AtLeast, Few, HostPath, Inside, Mounts, NoNul, Optional, Positive, Rule, Secret, Volumes,
    Word,
};
pub(super) use super::spec::Network;
pub(super) use super::volume::VolumeMount;
pub(super) use crate::env::Env;
pub(super) use crate::ids::{ItemRef, Name};
pub(super) use crate::note::Note;

/// Passes the rows to the macro `$then`, after `$first` if it is given.
macro_rules! spec_fields {
    ($then:ident $($first:ident)?) => { $then! { $($first)?
        /// The text to run in the shell of the box; the server trims it. Required by `box.exec`.
        cmd: String = (String::new()), NoNul;

        /// Working directory of the text: an absolute path; `mount_path` if absent. It must be
        /// `mount_path` or below it if a host directory is mounted there.
        workdir: String = (String::new()), Optional(Inside);

        /// Maximum run time of the text, in seconds.
        timeout_sec: u64 = 30, AtLeast(1), lockable TimeoutSec;

        /// Whether the box has network access.
        network: Network = (Network::Off), Any, fixed shown, lockable Network;

        /// The image of the root file system: `NAME[:TAG][@DIGEST]`, or its digest; if absent
        /// `host`, the system directories of the machine.
        image: String = None, Word, fixed shown, lockable Image;

        /// The snapshot with the first files of the box, by id, name or tag. The box has the image
        /// of the snapshot.
        snapshot: ItemRef = None, Any, fixed shown;

        /// When the server asks the registry for the image; `missing` if absent.
        pull: PullPolicy = None, Any, lockable Pull;

        /// The user of the commands on an image: a name or an id of the image, with a group after a
        /// colon. The user of the image if absent. `root` has no capability.
        user: String = None, Word, fixed shown;

        /// Environment variables of the text.
        env: Env = (Env::new()), Secret(Any);

        /// The host directory to mount as the workspace: an absolute path, which may be a Windows
        /// path. The workspace is private to the box if absent.
        host_path: String = None, Optional(HostPath), fixed hidden;

        /// How the workspace is mounted.
        host_path_mode: HostPathMode = (HostPathMode::Rw), Any, fixed shown, lockable HostPathMode;

        /// Where the workspace is mounted: an absolute path.
        mount_path: String = (DEFAULT_MOUNT_PATH.to_owned()), Inside, fixed hidden;

        /// Additional host directories to mount.
        extra_mounts: (Vec<BoxMountSpec>) = (Vec::new()), Mounts;

        /// Volumes to mount.
        volumes: (Vec<VolumeMount>) = (Vec::new()), Volumes, fixed shown;

        /// Whether the box stays when it is idle.
        persistent: bool = false, Any, fixed shown;

        /// CPU limit, in CPUs.
        cpus: f64 = 1.0, Positive, fixed shown, lockable Cpus;

        /// Memory limit, in MiB.
        memory_mb: u64 = 512, AtLeast(32), fixed shown, lockable MemoryMb;

        /// Maximum number of processes and threads.
        pids_limit: u64 = 128, AtLeast(1), fixed shown, lockable PidsLimit;

        /// Whether the system directories are read-only.
        read_only_rootfs: bool = true, Any, fixed shown, lockable ReadOnlyRootfs;

        /// Maximum size of the private files, in MiB: home, `/tmp`, directories and the writable
        /// root; 0 for 512 or three quarters of `memory_mb`, whichever is less. Up to three quarters
        /// of `memory_mb` is in memory, and a larger size on disk.
        disk_mb: u64 = 0, AtLeast(0), fixed shown, lockable DiskMb;

        /// Maximum size of the workspace and all other writable mounts together, in MiB; 0 for no
        /// limit.
        workspace_quota_mb: u64 = 0, AtLeast(0), fixed shown, lockable WorkspaceQuotaMb;

        /// A name that the owner can change, unique per gateway. The initial name determines the
        /// host name of the box.
        name: Name = None, Any;

        /// Labels to filter by: at most 64, with at most 16 KiB in total.
        labels: Labels = None, check_labels;

        /// Data of the gateway, stored with the box and returned unchanged.
        note: Note = None, Any;

        /// The gateway through which the box was created; `native` if absent.
        gateway: GatewayName = None, Any;

        /// When the server ends the box.
        lifetime: Lifetime = None, Any;

        /// Defaults of every command of the box.
        defaults: Defaults = None, Secret(check_defaults);

        /// The template that fills unset fields, by id, name or tag.
        template: ItemRef = None, Any, fixed shown;

        /// The pool to take the box from, by id, name or tag. A box that it cannot give is new, and
        /// its `pool_missed` says why.
        pool: ItemRef = None, Any;

        /// Commands that run before the box counts as running.
        prepare: Prepare = None, check_prepare;

        /// A command that starts with the box; without arguments, the command of its image.
        main: Main = None, check_main;

        /// Name and home directory of the guest user.
        guest: Guest = None, check_guest;

        /// Directories that exist from the start and belong to the guest user.
        dirs: (Vec<String>) = None, Few(Inside);

        /// The hosts that a box with network access may connect to.
        network_policy: (Box<NetworkPolicy>) = None, Any, lockable NetworkPolicy;

        /// Primitives that the box may lack: `network`, `image`. The result lists a missing network
        /// as `degraded`. With `image`, a box without its image uses the system directories. A quota is never missing: without support of the file system, the runtime
        /// measures the workspace.
        best_effort: (Vec<String>) = None, Few(Word);
    }};
}
pub(super) use spec_fields;

/// Passes the rows of the fixed fields to the macro `$then`, as `name: Type = default, shown;`.
macro_rules! fixed_fields {
    ($then:ident $(
        $(#[doc = $doc:literal])*
        $name:ident: $type:tt = $default:tt, $rule:expr $(, fixed $shown:ident)? $(, lockable $lock:ident)?;
    )*) => {
        $then! { $($($name: $type = $default, $shown;)?)* }
    };
}
pub(super) use fixed_fields;

/// Passes the rows of the lockable fields to `$then`, as `name: Type = default, rule, Lock;`.
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

/// The requested value, or the default.
macro_rules! or_default {
    ($asked:expr, None) => {
        $asked
    };
    ($asked:expr, $default:tt) => {
        $asked.unwrap_or_else(|| $default)
    };
}
pub(super) use or_default;
