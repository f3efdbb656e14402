//! `--with-toolchains`: read-only mounts of the toolchains in a home directory.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use box_protocol::{BoxMountSpec, DEFAULT_HOME, HostPathMode, default_path};

/// Directories of a home with programs and their files, without credentials.
const DIRECTORIES: [&str; 11] = [
    ".cargo/bin",
    ".rustup",
    ".nvm/versions/node",
    ".pyenv",
    ".local/bin",
    ".local/share/uv/python",
    ".local/share/uv/tools",
    ".bun/bin",
    ".deno/bin",
    ".volta",
    "go/bin",
];

/// Directories for `PATH`, in this order.
const PROGRAMS: [&str; 9] = [
    ".cargo/bin",
    ".pyenv/shims",
    ".pyenv/bin",
    ".local/bin",
    ".bun/bin",
    ".deno/bin",
    ".volta/bin",
    "go/bin",
    // Replaced by the `bin` of one version.
    ".nvm/versions/node",
];

/// Environment variables of the toolchains, with their directories.
const ROOTS: [(&str, &str); 3] = [
    ("RUSTUP_HOME", ".rustup"),
    ("PYENV_ROOT", ".pyenv"),
    ("VOLTA_HOME", ".volta"),
];

/// Directories of a home with credentials. No link to or above one of them is mounted.
const SECRETS: [&str; 5] = [".ssh", ".gnupg", ".aws", ".config", ".cargo"];

/// Mounts and environment variables for a box.
#[derive(Debug, Default)]
pub(crate) struct Toolchains {
    pub(crate) mounts: Vec<BoxMountSpec>,
    pub(crate) variables: Vec<(String, String)>,
}

/// Finds the toolchains of the user's home directory.
pub(crate) fn find() -> Result<Toolchains> {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    let home = home.context("--with-toolchains: HOME is not set; set it, or use --mount")?;
    find_in(Path::new(&home))
}

/// Mounts each directory at its own path, because programs contain absolute paths.
fn find_in(home: &Path) -> Result<Toolchains> {
    let unreadable = || "--with-toolchains: HOME is not a readable directory";
    let real_home = home.canonicalize().with_context(unreadable)?;
    ensure!(
        home.is_absolute(),
        "--with-toolchains: HOME must be an absolute path"
    );
    let mut found = Toolchains::default();
    for name in DIRECTORIES {
        let path = home.join(name);
        // Skip missing directories and dangling links.
        let Ok(real) = path.canonicalize() else {
            continue;
        };
        if !real.is_dir() {
            continue;
        }
        if !real.starts_with(&real_home) {
            bail!(
                "--with-toolchains: ~/{name} points outside the home directory; mount its target with --mount DIR:PATH"
            );
        }
        // The home directory is above all of these, also if they do not exist.
        let contains = |secret: &str| {
            let named = real_home.join(secret);
            let resolved = named.canonicalize().unwrap_or_else(|_| named.clone());
            named.starts_with(&real) || resolved.starts_with(&real)
        };
        if let Some(secret) = SECRETS.into_iter().find(|secret| contains(secret)) {
            bail!(
                "--with-toolchains: ~/{name} points to ~/{secret} or a directory above it; mount the tools with --mount DIR:PATH"
            );
        }
        let mount = BoxMountSpec::new(text(&real)?, text(&path)?, HostPathMode::Ro)?;
        found.mounts.push(mount);
    }
    let mut programs = Vec::new();
    for name in PROGRAMS {
        let path = home.join(name);
        let path = match name {
            ".nvm/versions/node" => node_programs(&home.join(".nvm"), &path),
            _ => Some(path),
        };
        if let Some(path) = path.filter(|path| path.is_dir()) {
            programs.push(text(&path)?);
        }
    }
    ensure!(
        !found.mounts.is_empty(),
        "--with-toolchains: found none of these in the home directory: {}",
        DIRECTORIES.join(", ")
    );
    programs.push(default_path(DEFAULT_HOME));
    found
        .variables
        .push(("PATH".to_owned(), programs.join(":")));
    for (name, root) in ROOTS {
        let path = home.join(root);
        if path.is_dir() {
            found.variables.push((name.to_owned(), text(&path)?));
        }
    }
    Ok(found)
}

/// The programs of the default version of Node, or of the newest.
fn node_programs(nvm: &Path, versions: &Path) -> Option<PathBuf> {
    let number = |name: &str| -> Option<Vec<u64>> {
        let parts = name.strip_prefix('v')?.split('.');
        parts.map(|part| part.parse().ok()).collect()
    };
    let names = std::fs::read_dir(versions).ok()?.flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let mut all: Vec<_> = names
        .filter_map(|name| Some((number(&name)?, name)))
        .collect();
    all.sort();
    let default = std::fs::read_to_string(nvm.join("alias/default")).ok();
    let wanted =
        default.and_then(|text| number(&format!("v{}", text.trim().trim_start_matches('v'))));
    let is_wanted = |version: &[u64]| {
        wanted
            .as_ref()
            .is_some_and(|wanted| version.starts_with(wanted))
    };
    let chosen = all.iter().rev().find(|(version, _)| is_wanted(version));
    let (_, name) = chosen.or(all.last())?;
    Some(versions.join(name).join("bin"))
}

fn text(path: &Path) -> Result<String> {
    let text = path.to_str();
    Ok(text
        .context("--with-toolchains: a path in the home directory is not UTF-8")?
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_toolchains_are_mounted_read_only_and_on_the_path() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let refused = find_in(&home).unwrap_err().to_string();
        assert!(refused.contains(".cargo/bin"), "{refused}");
        for directory in [
            ".cargo/bin",
            ".rustup",
            ".nvm/alias",
            ".nvm/versions/node/v9.1.0/bin",
            ".nvm/versions/node/v18.2.1/bin",
            ".nvm/versions/node/v20.1.0/bin",
            ".ssh",
        ] {
            std::fs::create_dir_all(home.join(directory)).unwrap();
        }
        let at = |name: &str| home.join(name).to_str().unwrap().to_owned();
        let found = find_in(&home).unwrap();
        let mounts: Vec<_> = found.mounts.iter().map(|mount| &mount.mount_path).collect();
        let expected = [".cargo/bin", ".rustup", ".nvm/versions/node"].map(at);
        assert_eq!(mounts, expected.iter().collect::<Vec<_>>());
        assert!(
            found
                .mounts
                .iter()
                .all(|mount| mount.mode == HostPathMode::Ro)
        );
        let path = |found: &Toolchains| found.variables[0].1.clone();
        let (cargo, node) = (at(".cargo/bin"), at(".nvm/versions/node/v20.1.0/bin"));
        assert_eq!(
            path(&found),
            format!("{cargo}:{node}:{}", default_path(DEFAULT_HOME))
        );
        let rustup = ("RUSTUP_HOME".to_owned(), at(".rustup"));
        assert_eq!(found.variables[1..], [rustup]);
        std::fs::write(home.join(".nvm/alias/default"), "18\n").unwrap();
        assert!(path(&find_in(&home).unwrap()).contains("/v18.2.1/bin:"));
    }

    #[test]
    fn a_link_out_of_the_home_is_refused() {
        let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir_all(home.path().join("tools")).unwrap();
        std::os::unix::fs::symlink("tools", home.path().join(".volta")).unwrap();
        assert_eq!(
            find_in(home.path()).unwrap().mounts.len(),
            1,
            "control: within"
        );
        std::os::unix::fs::symlink(other.path(), home.path().join(".rustup")).unwrap();
        let refused = find_in(home.path()).unwrap_err().to_string();
        assert!(refused.contains("~/.rustup points outside"), "{refused}");
    }

    #[test]
    fn a_link_to_the_home_or_to_credentials_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        for directory in [".ssh", ".cargo/bin", "dotfiles/config", "tools"] {
            std::fs::create_dir_all(at(directory)).unwrap();
        }
        std::os::unix::fs::symlink("dotfiles/config", at(".config")).unwrap();
        for (target, allowed) in [
            ("tools", true),
            (".cargo/bin", true),
            (".", false),
            (".ssh", false),
            (".cargo", false),
            (".config", false),
            ("dotfiles", false),
        ] {
            std::os::unix::fs::symlink(target, at(".volta")).unwrap();
            let found = find_in(home.path());
            assert_eq!(found.is_ok(), allowed, "{target}: {found:?}");
            if let Err(refused) = found {
                let refused = refused.to_string();
                assert!(
                    refused.contains("~/.volta points to"),
                    "{target}: {refused}"
                );
            }
            std::fs::remove_file(at(".volta")).unwrap();
        }
    }
}
