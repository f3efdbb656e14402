//! Kernel features that boxes need, and the effect of a missing one.

use box_sys::Primitives;

use super::disk::DiskReport;
use crate::backend::{Diagnosis, Difference, Feature};

/// Name, whether boxes require it, and its purpose or the effect of its absence.
#[rustfmt::skip]
const ALL: [(&str, bool, &str); 21] = [
    ("namespace.user", true, "private user and group ids without rights on the host"),
    ("namespace.pid", true, "private process tree, which the kernel kills as a whole"),
    ("namespace.mount", true, "private root directory"),
    ("namespace.net", true, "private network, empty at first"),
    ("namespace.uts", true, "private host name"),
    ("namespace.ipc", true, "private message queues and shared memory"),
    ("namespace.cgroup", true, "hides the cgroup paths of the host"),
    ("seccomp", true, "allow list of system calls"),
    ("landlock", false, "second file access check; without it, only mounts and permissions protect files"),
    ("overlay", false, "private overlay of the system directories; without it, boxes share watches and locks there, and may be unable to use images; one file mounted below /usr has the first effect"),
    ("overlay.workspace", false, "changes of a workspace stay in the box; without it, a workspace cannot have the mode overlay"),
    ("two_uids", false, "separate ids of agent and guest; without it, seccomp, Landlock and the dumpable flag protect the agent"),
    ("cgroup.memory", false, "memory limit per box; without it, memory is limited per process"),
    ("cgroup.pids", false, "process limit per box; without it, processes are limited per user id of the box"),
    ("cgroup.cpu", false, "limit of CPU time; without it, CPU time is not limited"),
    ("cgroup.cpu_usage", false, "measurement of CPU time; without it, CPU time is not measured"),
    ("cgroup.freeze", false, "pause of boxes; without it, a box cannot be paused, and only a stopped box can be copied"),
    ("cgroup.io", false, "limit of disk bandwidth (runtime.disk_read_mb_per_s, runtime.disk_write_mb_per_s); without it, disk bandwidth cannot be limited"),
    ("disk.limit", false, "writes beyond disk_mb fail; without it, the runtime kills a box that exceeds disk_mb; requires root with loop devices and mke2fs, or project quotas"),
    ("network", false, "network access; without it, boxes have none; requires nftables with NAT in the kernel"),
    ("network.connect_errors", false, "error of a failed connection; without it, failed connections are reset instead of refused or unreachable; requires nfnetlink_queue"),
];

/// Features that do not contribute to the protection of a box.
///
/// Boxes with a disk list `disk.limit` themselves.
const NO_PROTECTION: [&str; 4] = [
    "network.connect_errors",
    "cgroup.io",
    "disk.limit",
    "overlay.workspace",
];

/// Returns the features of this machine.
///
/// `disk` describes the kind of disk, if boxes can be made.
pub(super) fn of(found: &Primitives, disk: Option<DiskReport>) -> Diagnosis {
    let mut missing = found.missing();
    if disk.is_none_or(|disk| !disk.enforced) {
        missing.push(super::disk::LIMIT.to_owned());
    }
    let features = ALL.map(|(name, required, about)| Feature {
        name,
        required,
        about,
        present: !missing.iter().any(|missing| missing == name),
        protects: !NO_PROTECTION.contains(&name),
    });
    Diagnosis {
        user: if found.privileged {
            "root"
        } else {
            "an ordinary user"
        },
        rootfs: "host",
        disk: disk.map_or("none", |disk| disk.kind),
        landlock: found.landlock,
        features: features.into(),
        differences: &DIFFERENCES,
    }
}

const DIFFERENCES: [Difference; 5] = [
    Difference {
        what: "user id of the agent",
        as_root: "separate from the guest's",
        as_ordinary_user: "the guest's, because the kernel maps only one id",
    },
    Difference {
        what: "owner of new files in a workspace",
        as_root: "the owner of the workspace, by an id-mapped mount; requires a filesystem that supports it",
        as_ordinary_user: "this user",
    },
    Difference {
        what: "owners of the files of an image",
        as_root: "those of the image, by an id-mapped mount; requires a filesystem that supports it",
        as_ordinary_user: "the guest; boxes list image.owners as missing, and chown fails",
    },
    Difference {
        what: "disk of a box (disk_mb)",
        as_root: "a file system in a file, or a directory with a project quota; writes beyond the limit fail",
        as_ordinary_user: "a directory; the runtime kills a box that exceeds the limit",
    },
    Difference {
        what: "limits",
        as_root: "enforced by cgroups, version 1 or 2",
        as_ordinary_user: "enforced by delegated cgroups, otherwise per process",
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
            overlay_workspace: Some(false),
            cgroup_missing: vec![
                box_sys::CgroupFeature::Cpu,
                box_sys::CgroupFeature::Memory,
                box_sys::CgroupFeature::Pids,
                box_sys::CgroupFeature::CpuUsage,
                box_sys::CgroupFeature::Freeze,
                box_sys::CgroupFeature::Disk,
            ],
            network: Some(false),
            syn_queue: Some(false),
        };
        let mut missing = everything_missing.missing();
        missing.push(super::super::disk::LIMIT.to_owned());
        let listed = super::of(&everything_missing, None).features;
        assert!(listed.iter().all(|feature| !feature.present));
        assert_eq!(listed.len(), missing.len());
        let required = everything_missing.missing_required();
        for feature in listed {
            let expected = required.iter().any(|name| name == feature.name);
            assert_eq!(feature.required, expected, "{}", feature.name);
        }
    }
}
