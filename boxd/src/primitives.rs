//! What a box is made of, and what it loses where something is missing.

use serde::Serialize;

/// One thing a box is made of.
#[derive(Debug, Serialize)]
pub(crate) struct Primitive {
    /// The name under which it is reported as missing.
    pub(crate) name: &'static str,
    /// Without it no box is made.
    pub(crate) required: bool,
    /// What it is for, or what happens without it.
    pub(crate) about: &'static str,
    /// Whether this machine gives it to this user.
    pub(crate) present: bool,
}

#[rustfmt::skip]
const ALL: [(&str, bool, &str); 19] = [
    ("namespace.user", true, "ids of its own, which mean nothing outside"),
    ("namespace.pid", true, "sees and signals its own processes only, and ends as a whole"),
    ("namespace.mount", true, "a root directory of its own"),
    ("namespace.net", true, "an empty network of its own"),
    ("namespace.uts", true, "a host name of its own"),
    ("namespace.ipc", true, "message queues and shared memory of its own"),
    ("namespace.cgroup", true, "does not see where its cgroups are"),
    ("seccomp", true, "only known system calls"),
    ("landlock", false, "a second fence around files; without it, mounts and permissions alone"),
    ("overlay", false, "without it, no box on an image of its own, and watches and locks of boxes in system directories meet"),
    ("two_uids", false, "without it the agent has the guest's id, and seccomp, Landlock and being non-dumpable fence it"),
    ("cgroup.memory", false, "without it, memory is limited for each process, not for all together"),
    ("cgroup.pids", false, "without it, the kernel counts processes per user of the box"),
    ("cgroup.cpu", false, "without it, processor time is not limited"),
    ("cgroup.cpu_usage", false, "without it, processor time is not counted"),
    ("cgroup.freeze", false, "without it, a box cannot be paused"),
    ("cgroup.io", false, "without it, disk bandwidth cannot be limited (runtime.disk_read_mb_per_s, runtime.disk_write_mb_per_s)"),
    ("network", false, "without it, no box reaches out; needs nftables with nat in the kernel"),
    ("network.gate", false, "without it, a connection that nobody takes is reset instead of refused or unreachable; needs nfnetlink_queue"),
];

/// All of them, as this machine has them.
pub(crate) fn all(missing: &[String]) -> Vec<Primitive> {
    let present = |name: &str| !missing.iter().any(|missing| missing == name);
    ALL.map(|(name, required, about)| Primitive {
        name,
        required,
        about,
        present: present(name),
    })
    .into()
}

/// Something that root's boxes have in another way than an ordinary user's.
#[derive(Debug, Serialize)]
pub(crate) struct Difference {
    pub(crate) what: &'static str,
    pub(crate) as_root: &'static str,
    pub(crate) as_ordinary_user: &'static str,
}

pub(crate) const DIFFERENCES: [Difference; 3] = [
    Difference {
        what: "who the agent is",
        as_root: "an id of its own, apart from the guest's",
        as_ordinary_user: "the guest's id: the kernel maps one id only",
    },
    Difference {
        what: "whose the files in a workspace are",
        as_root: "the workspace's owner's, by a mount that maps ids; needs a file system that can",
        as_ordinary_user: "this user's",
    },
    Difference {
        what: "limits",
        as_root: "by cgroups, version 1 or 2",
        as_ordinary_user: "by cgroups where this user was given one, otherwise for each process",
    },
];

#[cfg(test)]
mod tests {
    #[test]
    fn every_name_that_can_be_missing_is_explained() {
        let everything_missing = box_sys::Primitives {
            privileged: false,
            namespaces_missing: ["user", "pid", "mount", "net", "uts", "ipc", "cgroup"]
                .map(str::to_owned)
                .into(),
            seccomp: false,
            landlock: 0,
            overlay: false,
            cgroup_missing: vec![
                box_sys::Ability::Cpu,
                box_sys::Ability::Memory,
                box_sys::Ability::Pids,
                box_sys::Ability::CpuUsage,
                box_sys::Ability::Freeze,
                box_sys::Ability::Disk,
            ],
            network: Some(false),
            gate: Some(false),
        };
        let missing = everything_missing.missing();
        let listed = super::all(&missing);
        assert!(listed.iter().all(|primitive| !primitive.present));
        assert_eq!(listed.len(), missing.len());
        let required = everything_missing.missing_required();
        for primitive in listed {
            let expected = required.iter().any(|name| name == primitive.name);
            assert_eq!(primitive.required, expected, "{}", primitive.name);
        }
    }
}
