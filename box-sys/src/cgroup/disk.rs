//! Disk bandwidth limits of boxes.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use super::write;

/// Bytes per second of one box on each disk of the host. `None` means no limit.
///
/// Cgroup version 1 does not count writes through the page cache; version 2 does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Read limit.
    pub read: Option<u64>,
    /// Write limit.
    pub write: Option<u64>,
}

impl DiskLimits {
    /// Whether any limit is set.
    pub(crate) fn is_limited(self) -> bool {
        self.read.is_some() || self.write.is_some()
    }
}

/// The limits, and the disks of the host when the server started.
#[derive(Debug)]
pub(super) struct Disks {
    limits: DiskLimits,
    numbers: Vec<String>,
}

impl Disks {
    /// Finds the disks. The caller still sees the host's `/sys`.
    pub(super) fn find(limits: DiskLimits) -> Self {
        let numbers = if limits.is_limited() {
            disks()
        } else {
            Vec::new()
        };
        Self { limits, numbers }
    }

    /// Sets the limits of a new cgroup. They are the same for every box.
    pub(super) fn limit(&self, group: &OwnedFd, v2: bool) -> io::Result<()> {
        let DiskLimits { read, write: wrote } = self.limits;
        for disk in &self.numbers {
            if v2 {
                let most = |limit: Option<u64>| limit.map_or("max".into(), |n| n.to_string());
                let line = format!("{disk} rbps={} wbps={}", most(read), most(wrote));
                ignore_removed(write(group, "io.max", &line))?;
                continue;
            }
            let files = [
                ("blkio.throttle.read_bps_device", read),
                ("blkio.throttle.write_bps_device", wrote),
            ];
            for (file, limit) in files {
                if let Some(limit) = limit {
                    ignore_removed(write(group, file, &format!("{disk} {limit}")))?;
                }
            }
        }
        Ok(())
    }
}

/// Ignores the error for a disk that was removed after the server started.
fn ignore_removed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        written => written,
    }
}

/// Numbers of the physical disks.
///
/// Stacked devices such as volumes pass their requests to these.
fn disks() -> Vec<String> {
    let all = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    all.filter(|disk| disk.path().join("device").exists())
        .filter_map(|disk| fs::read_to_string(disk.path().join("dev")).ok())
        .map(|number| number.trim().to_owned())
        .collect()
}
