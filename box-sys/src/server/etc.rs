//! The `/etc` of a box on the host's directories.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::error::{At, Result};
use crate::identity;
use crate::mounts::{create_dirs, open_beneath};

/// Files of the host's `/etc` that boxes get. None of them is secret.
///
/// They are copied. Copies need fewer mounts and do not change in a running box.
const ETC: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "default/locale",
    "ethertypes",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "mailcap",
    "mime.types",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "profile",
    "protocols",
    "python3",
    "redhat-release",
    "rpc",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vimrc",
    "xattr.conf",
];
/// Largest copied file and number of entries, so that `/etc` cannot fill memory.
const ETC_FILE_MAX: u64 = 1 << 20;
const ETC_ENTRIES_MAX: usize = 10_000;

/// Runs after `/etc/profile`, which resets `PATH`. Adds the guest's own programs.
const LOGIN: &[u8] = b"case \":$PATH:\" in\n*\":$HOME/.local/bin:\"*) ;;\n*) PATH=\"$HOME/.local/bin:$PATH\" ;;\nesac\n";

/// Makes the `/etc` of the template.
pub(super) fn copy(root: &OwnedFd) -> Result<()> {
    let etc = create_dirs(root.as_fd(), Path::new("p/etc")).at("open the new /etc")?;
    let mut left = ETC_ENTRIES_MAX;
    for name in ETC {
        let from = Path::new("/etc").join(name);
        let parent = Path::new(name).parent().unwrap_or(Path::new(""));
        let Some(file) = from.file_name() else {
            continue;
        };
        if fs::symlink_metadata(&from).is_err() {
            continue;
        }
        let parent = create_dirs(etc.as_fd(), parent).at("create a directory of /etc")?;
        copy_tree(&from, &parent, file, &mut left).at("copy a file of /etc")?;
    }
    let profile =
        create_dirs(etc.as_fd(), Path::new("profile.d")).at("create a directory of /etc")?;
    write_new(&profile, "box.sh", LOGIN).at("write a file of /etc")?;
    for name in identity::FILES {
        rustix::fs::symlinkat(format!("/run/box/{name}"), &etc, *name)
            .at("create a link of /etc")?;
    }
    rustix::fs::symlinkat("/proc/self/mounts", &etc, "mtab").at("create a link of /etc")
}

fn write_new(dir: &OwnedFd, name: impl rustix::path::Arg, content: &[u8]) -> io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let to = rustix::fs::openat(dir, name, flags, Mode::from(0o644))?;
    io::Write::write_all(&mut fs::File::from(to), content)
}

/// Copies files, links and directories. Skips unreadable ones.
fn copy_tree(
    from: &Path,
    dir: &OwnedFd,
    name: &std::ffi::OsStr,
    left: &mut usize,
) -> io::Result<()> {
    if *left == 0 {
        return Ok(());
    }
    *left -= 1;
    let Ok(meta) = fs::symlink_metadata(from) else {
        return Ok(());
    };
    if meta.is_symlink() {
        rustix::fs::symlinkat(fs::read_link(from)?, dir, name)?;
    } else if meta.is_dir() {
        let Ok(entries) = fs::read_dir(from) else {
            return Ok(());
        };
        rustix::fs::mkdirat(dir, name, Mode::from(0o755))?;
        let below = open_beneath(dir, name, OFlags::PATH | OFlags::DIRECTORY)?;
        for entry in entries.flatten() {
            copy_tree(&entry.path(), &below, &entry.file_name(), left)?;
        }
    } else if meta.is_file() && meta.len() <= ETC_FILE_MAX && meta.mode() & 0o004 != 0 {
        // Only world-readable files, because a server of root could read secrets.
        if let Ok(content) = fs::read(from) {
            write_new(dir, name, &for_box(from, content))?;
        }
    }
    Ok(())
}

/// Returns the content of a copied file for the box.
///
/// Debian's `/etc/profile` starts a process that prints the user id. The process takes longer than
/// the rest of a login, and bash has the id in a variable.
fn for_box(from: &Path, content: Vec<u8>) -> Vec<u8> {
    if from != Path::new("/etc/profile") {
        return content;
    }
    match String::from_utf8(content) {
        Ok(profile) => profile.replace("$(id -u)", "${EUID:-$(id -u)}").into(),
        Err(error) => error.into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_login_of_bash_starts_no_process_for_the_user_id() {
        let debian = "if [ \"$(id -u)\" -eq 0 ]; then echo root; else echo user; fi";
        let run = |shell: &str, profile: &[u8]| {
            let profile = String::from_utf8_lossy(profile).into_owned();
            let mut shell = Command::new(shell);
            let ran = shell.args(["-c", &profile]).env("PATH", "/nonexistent");
            let ran = ran.output().unwrap();
            (ran.stdout, ran.stderr.is_empty())
        };
        let is_root = rustix::process::getuid().is_root();
        let found: &[u8] = if is_root { b"root\n" } else { b"user\n" };
        let profile = for_box(Path::new("/etc/profile"), debian.into());
        assert_eq!(run("/bin/bash", &profile), (found.to_vec(), true));
        assert!(
            !run("/bin/bash", debian.as_bytes()).1,
            "it starts a process"
        );
        // A shell without the variable still starts it.
        assert!(!run("/bin/dash", &profile).1);
    }

    #[test]
    fn other_files_are_copied_as_they_are() {
        let content = b"$(id -u) \xff";
        for path in ["/etc/bash.bashrc", "/etc/profile.d/x.sh"] {
            assert_eq!(for_box(Path::new(path), content.into()), content);
        }
        assert_eq!(for_box(Path::new("/etc/profile"), content.into()), content);
    }
}
