//! The user of an image: from a name or an id to the guest of a box.
//!
//! The image's own files of users and groups decide. They are untrusted: the runtime opens them
//! beneath the root directory, follows no link, and reads a bounded number of bytes.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use box_protocol::{BoxError, DEFAULT_HOME, Invalid};
use box_sys::Guest;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};

/// Most bytes of a file of users or groups.
const BYTES_MAX: u64 = 1 << 20;

/// Name of a user that has none in the image.
const NAME: &str = "box";

/// Top-level directories that cannot be a home directory, because Box makes them.
const NO_HOME: [&str; 9] = [
    "proc", "dev", "sys", "etc", "usr", "bin", "sbin", "lib", "run",
];

/// Returns the guest for `NAME`, `UID`, `NAME:GROUP` or `UID:GID` of an image.
///
/// An empty text means root, as in the configuration of an image.
pub(super) fn resolve(root: &Path, user: &str) -> Result<Guest, BoxError> {
    let (user, group) = match user.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (user, None),
    };
    let user = if user.is_empty() { "root" } else { user };
    let passwd = read(root, "etc/passwd");
    let entry = find(&passwd, user);
    let id = match (&entry, user) {
        (Some(entry), _) => number(entry.get(2)),
        (None, "root") => Some(0),
        (None, user) => user.parse().ok(),
    };
    let id = id.ok_or_else(|| unknown("user", user))?;
    let group = match group {
        None => entry
            .as_ref()
            .and_then(|entry| number(entry.get(3)))
            .unwrap_or(if entry.is_some() { id } else { 0 }),
        Some(group) => {
            let groups = read(root, "etc/group");
            let found = find(&groups, group).and_then(|entry| number(entry.get(2)));
            let group_id = found.or_else(|| group.parse().ok());
            group_id.ok_or_else(|| unknown("group", group))?
        }
    };
    if let Some(problem) = Guest::id_problem(id).or_else(|| Guest::id_problem(group)) {
        return Err(Invalid::new("user", problem).into());
    }
    let field = |n: usize| entry.as_ref().and_then(|entry| entry.get(n).copied());
    let name = field(0).or((id == 0).then_some("root"));
    let name = name.filter(|name| is_plain(name)).unwrap_or(NAME);
    let home = field(5).or((id == 0).then_some("/root"));
    let home = home.filter(|home| is_home(home)).unwrap_or(DEFAULT_HOME);
    Ok(Guest {
        name: name.to_owned(),
        home: home.into(),
        id,
        group,
    })
}

fn unknown(what: &str, name: &str) -> BoxError {
    let shown: String = name.chars().take(64).collect();
    let problem =
        format!("{what} `{shown}` does not exist in the image; use an id or another name");
    Invalid::new("user", problem).into()
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 64 && name.chars().all(plain) && !name.starts_with(['-', '.'])
}

/// Whether a home directory is a path below the root that Box does not make itself.
fn is_home(home: &str) -> bool {
    let mut components = Path::new(home).components();
    let is_absolute = components.next() == Some(Component::RootDir);
    let mut names = components.map(|component| match component {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let first = names.next().flatten();
    is_absolute
        && first.is_some_and(|first| !NO_HOME.contains(&first) && !first.starts_with("lib"))
        && names.all(|name| name.is_some())
        && home.len() < 1024
        && !home.contains(|c: char| c == ':' || c.is_ascii_control())
}

/// Returns the fields of the first line with this name, or with this id.
fn find<'a>(text: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let mut lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let id = name.parse::<u32>().ok();
    lines.find(|fields| match id {
        Some(id) => number(fields.get(2)) == Some(id),
        None => fields.first() == Some(&name),
    })
}

fn number(field: Option<&&str>) -> Option<u32> {
    field?.parse().ok()
}

/// Reads a file of an image. A missing or odd file is empty.
fn read(root: &Path, name: &str) -> String {
    let open = || -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat2(CWD, root, flags, Mode::empty(), ResolveFlags::empty());
        // Non-blocking, so that a FIFO cannot block the runtime.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let file = rustix::fs::openat2(root.ok()?, name, flags, Mode::empty(), beneath).ok()?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).ok()?.st_mode);
        (kind == FileType::RegularFile).then_some(file)
    };
    let mut bytes = Vec::new();
    if let Some(file) = open() {
        let _ = File::from(file).take(BYTES_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(passwd: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        std::fs::write(root.path().join("etc/group"), "root:x:0:\nstaff:x:50:\n").unwrap();
        root
    }

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
        node:x:1000:1001::/home/node:/bin/bash\n\
        odd name:x:7:7::/../etc:/bin/sh\n\
        nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";

    #[test]
    fn users_are_found_by_name_and_id() {
        let image = image(PASSWD);
        let of = |user: &str| {
            let guest = resolve(image.path(), user).unwrap();
            let home = guest.home.display().to_string();
            (guest.name, home, guest.id, guest.group)
        };
        let is = |name: &str, home: &str, id, group| (name.to_owned(), home.to_owned(), id, group);
        assert_eq!(of(""), is("root", "/root", 0, 0));
        assert_eq!(of("root"), is("root", "/root", 0, 0));
        assert_eq!(of("node"), is("node", "/home/node", 1000, 1001));
        assert_eq!(of("1000"), is("node", "/home/node", 1000, 1001));
        assert_eq!(of("node:staff"), is("node", "/home/node", 1000, 50));
        assert_eq!(of("1000:7"), is("node", "/home/node", 1000, 7));
        assert_eq!(of("nobody"), is("nobody", "/nonexistent", 65534, 65534));
        assert_eq!(of("4321"), is("box", "/home/box", 4321, 0));
        // Names and homes that a box cannot have are replaced.
        assert_eq!(of("daemon"), is("daemon", "/home/box", 1, 1));
        assert_eq!(of("7"), is("box", "/home/box", 7, 7));
        for unknown in ["ada", "node:ghosts", "-1", "99999999999"] {
            let error = resolve(image.path(), unknown).unwrap_err();
            assert!(error.message().starts_with("user"), "{error:?}");
        }
    }

    #[test]
    fn the_files_of_an_image_are_not_trusted() {
        let image = image(PASSWD);
        let passwd = image.path().join("etc/passwd");
        std::fs::remove_file(&passwd).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &passwd).unwrap();
        assert!(
            resolve(image.path(), "daemon").is_err(),
            "no link is followed"
        );
        assert_eq!(resolve(image.path(), "root").unwrap().id, 0);
        std::fs::remove_file(&passwd).unwrap();
        rustix::fs::mkfifoat(CWD, &passwd, Mode::RUSR).unwrap();
        assert!(resolve(image.path(), "daemon").is_err(), "no pipe is read");
        std::fs::remove_dir_all(image.path().join("etc")).unwrap();
        assert_eq!(resolve(image.path(), "12:34").unwrap().group, 34);
    }
}
