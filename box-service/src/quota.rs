//! Size limit of a workspace, checked before and after a command.
//!
//! [`box_sys::walk`] measures it. Symbolic links are counted, never followed.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use box_protocol::error::{Detail, Subject, quota_exceeded};
use box_protocol::{BoxError, BoxInfo, BoxSpec, HostPathMode};
use box_sys::walk::Size;

/// Default maximum number of entries of a workspace with a quota.
pub const DEFAULT_MAX_WORKSPACE_ENTRIES: u64 = 100_000;

/// Limits of a workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    /// The workspace and other writable directories of the box, none nested.
    roots: Vec<PathBuf>,
    megabytes: u64,
    max_entries: u64,
}

/// Time of a quota check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckTime {
    /// Before the command starts.
    Before,
    /// After the command has ended.
    After,
}

impl fmt::Display for CheckTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Before => "before execution",
            Self::After => "after execution",
        })
    }
}

impl Quota {
    /// Returns the quota of this spec; `None` without a limit or a directory.
    pub fn of(spec: &BoxSpec, max_entries: u64) -> Option<Self> {
        if spec.workspace_quota_mb == 0 {
            return None;
        }
        let own = spec.host_path.iter().filter(|_| spec.mounts_host_path());
        let writable = spec
            .extra_mounts
            .iter()
            .filter(|mount| mount.mode == HostPathMode::Rw);
        let all: Vec<&Path> = own
            .chain(writable.map(|mount| &mount.host_path))
            .map(Path::new)
            .collect();
        let roots: Vec<PathBuf> = box_sys::walk::outermost(&all)
            .map(|path| (*path).to_owned())
            .collect();
        if roots.is_empty() {
            return None;
        }
        Some(Self {
            roots,
            megabytes: spec.workspace_quota_mb,
            max_entries,
        })
    }

    /// Returns the quota of an existing box over its workspace, if it has one.
    pub fn of_box(info: &BoxInfo, max_entries: u64) -> Option<Self> {
        let mounted = info.host_path_mode != HostPathMode::None;
        let workspace = info.host_path.as_ref().filter(|_| mounted)?;
        (info.workspace_quota_mb > 0).then(|| Self {
            roots: vec![workspace.into()],
            megabytes: info.workspace_quota_mb,
            max_entries,
        })
    }

    /// Refuses a workspace over its quota. Blocks while it counts.
    pub fn check(&self, moment: CheckTime) -> Result<(), BoxError> {
        let limit = self.megabytes.saturating_mul(1024 * 1024);
        let text = match count(&self.roots, limit, self.max_entries) {
            Ok(Counted::Within) => return Ok(()),
            Ok(Counted::TooManyBytes) => {
                return Err(quota_exceeded(
                    self.megabytes,
                    &format!(", counted {moment}; remove files or raise the quota"),
                ));
            }
            Ok(Counted::TooManyEntries) => {
                let message = format!(
                    "policy.max_workspace_entries: the workspace exceeds {} entries, counted {moment}; \
                     remove files or raise the limit",
                    self.max_entries
                );
                return Err(BoxError::capacity(message).with_detail(&Detail {
                    limit: Some("max_workspace_entries".to_owned()),
                    max: Some(self.max_entries),
                    ..Detail::about(Subject::Disk)
                }));
            }
            // An uncountable directory must not count as empty: a guest could hide files that way.
            Err(error) => format!(
                "workspace_quota_mb: the workspace cannot be measured {moment}: {}",
                error.kind()
            ),
        };
        Err(BoxError::validation(text).with_detail(&Detail {
            field: Some("workspace_quota_mb".to_owned()),
            ..Detail::default()
        }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counted {
    Within,
    TooManyBytes,
    TooManyEntries,
}

/// Counts until a limit is exceeded. Ignores entries that vanish meanwhile.
fn count(roots: &[PathBuf], max_bytes: u64, max_entries: u64) -> io::Result<Counted> {
    let mut size = Size::default();
    for root in roots {
        match box_sys::walk::open(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            root => size.add(root?, &[], |size| {
                size.bytes <= max_bytes && size.entries <= max_entries
            })?,
        }
    }
    Ok(if size.entries > max_entries {
        Counted::TooManyEntries
    } else if size.bytes > max_bytes {
        Counted::TooManyBytes
    } else {
        Counted::Within
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use box_protocol::{Code, SpecDraft};
    use std::fs;
    use std::os::unix::fs::symlink;

    const MIB: usize = 1024 * 1024;

    fn quota(root: &Path, megabytes: u64, max_entries: u64) -> Quota {
        Quota {
            roots: vec![root.to_owned()],
            megabytes,
            max_entries,
        }
    }

    #[test]
    fn bytes_are_added_up_over_directories() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("one"), vec![0; MIB]).unwrap();
        fs::write(dir.path().join("a/b/two"), vec![0; MIB / 2]).unwrap();
        let quota = quota(dir.path(), 2, 100);
        quota.check(CheckTime::Before).unwrap();
        fs::write(dir.path().join("a/three"), vec![0; MIB]).unwrap();
        let error = quota.check(CheckTime::Before).unwrap_err();
        assert_eq!(error.code(), Code::Capacity);
        assert!(
            error.message().starts_with(
                "workspace_quota_mb: the workspace exceeds 2 MiB, counted before execution"
            ),
            "{error}"
        );
        let error = quota.check(CheckTime::After).unwrap_err();
        assert!(
            error.message().starts_with(
                "workspace_quota_mb: the workspace exceeds 2 MiB, counted after execution"
            ),
            "{error}"
        );
        assert!(!error.message().contains(dir.path().to_str().unwrap()));
    }

    #[test]
    fn entries_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        quota(dir.path(), 1, 3).check(CheckTime::Before).unwrap();
        let error = quota(dir.path(), 1, 2)
            .check(CheckTime::Before)
            .unwrap_err();
        assert!(error.message().contains("2 entries"), "{error}");
    }

    #[test]
    fn links_are_not_followed() {
        let (dir, big) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(big.path().join("file"), vec![0; 2 * MIB]).unwrap();
        symlink(big.path(), dir.path().join("directory")).unwrap();
        symlink(big.path().join("file"), dir.path().join("file")).unwrap();
        symlink(dir.path(), dir.path().join("loop")).unwrap();
        quota(dir.path(), 1, 100).check(CheckTime::Before).unwrap();
        let error = quota(&dir.path().join("directory"), 1, 100);
        let error = error.check(CheckTime::Before).unwrap_err();
        assert!(error.message().contains("cannot be measured"), "{error}");
    }

    #[test]
    fn only_a_mounted_workspace_with_a_quota_is_counted() {
        let draft = SpecDraft::new("s").workspace_quota_mb(1);
        let of = |draft: SpecDraft| Quota::of(&draft.build().unwrap(), 10);
        assert_eq!(of(draft.clone()), None);
        let mounted = draft.host_path("/data");
        assert_eq!(of(mounted.clone()), Some(quota(Path::new("/data"), 1, 10)));
        assert_eq!(of(mounted.clone().host_path_mode(HostPathMode::None)), None);
        assert_eq!(of(mounted.workspace_quota_mb(0)), None);
    }

    #[test]
    fn each_writable_directory_counts_once() {
        let mount = |path: &str, mode| box_protocol::BoxMountSpec::new(path, "/x", mode).unwrap();
        let roots = |host_path: Option<&str>, mounts| {
            let mut draft = SpecDraft::new("s")
                .workspace_quota_mb(1)
                .extra_mounts(mounts);
            draft.host_path = host_path.map(str::to_owned);
            let quota = Quota::of(&draft.build().unwrap(), 10);
            quota.map(|quota| quota.roots)
        };
        let (rw, ro) = (HostPathMode::Rw, HostPathMode::Ro);
        assert_eq!(roots(None, vec![mount("/w", ro)]), None);
        assert_eq!(roots(None, vec![mount("/w", rw)]), Some(vec!["/w".into()]));
        let nested = vec![mount("/w/inner", rw), mount("/w", rw), mount("/other", rw)];
        assert_eq!(
            roots(Some("/w"), nested),
            Some(vec!["/w".into(), "/other".into()])
        );
    }
}
