//! The Python of an environment that needs a newer one than the machine's `python3`.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{
    Result,
    command::{self, Workspace},
};

/// The versions that an environment may ask for, and those that may stand in for it.
const VERSIONS: [&str; 3] = ["3.12", "3.13", "3.14"];

/// Returns a Python of this version or later, from `PATH` or pyenv.
pub(crate) fn find(workspace: &Workspace, version: &str) -> Result<PathBuf> {
    // A program on `PATH` may be of pyenv, and fail if its version is not selected. That of Debian may lack `ensurepip`.
    let works = |python: &Path| {
        let mut python = workspace.program(python, "-c");
        command::succeeds(python.arg("import ensurepip, venv"))
    };
    first(version, &pyenv(), works).ok_or_else(|| {
        let message = format!(
            "Python {version} or later: not found; install python{version} or a version of pyenv"
        );
        message.into()
    })
}

/// Returns the names of the versions of pyenv, with their folders.
fn pyenv() -> Vec<(String, PathBuf)> {
    let home = || env::home_dir().map(|home| home.join(".pyenv"));
    let root = env::var_os("PYENV_ROOT").map(PathBuf::from).or_else(home);
    let folders = root.and_then(|root| fs::read_dir(root.join("versions")).ok());
    let folders = folders.into_iter().flatten().flatten();
    let mut versions: Vec<_> = folders
        .map(|folder| {
            let name = folder.file_name().to_string_lossy().into_owned();
            (name, folder.path())
        })
        .collect();
    versions.sort();
    versions
}

/// Returns the first Python that works, in the order of versions.
fn first(
    version: &str,
    pyenv: &[(String, PathBuf)],
    works: impl Fn(&Path) -> bool,
) -> Option<PathBuf> {
    let enough = VERSIONS.iter().skip_while(|known| **known != version);
    let programs = enough.flat_map(|version| {
        let program = format!("python{version}");
        let in_pyenv = pyenv.iter().filter(|(name, _)| is_patch(name, version));
        let in_pyenv = in_pyenv.map(|(_, folder)| folder.join("bin").join(&program));
        let in_pyenv: Vec<_> = in_pyenv.collect();
        std::iter::once(PathBuf::from(program)).chain(in_pyenv)
    });
    programs.into_iter().find(|program| works(program))
}

/// Returns whether a name is a release of the version, as `3.12.1` of `3.12`; `3.13.0t` and `3.14.0rc1` are not.
fn is_patch(name: &str, version: &str) -> bool {
    let patch = name
        .strip_prefix(version)
        .and_then(|rest| rest.strip_prefix('.'));
    patch.is_some_and(|patch| patch.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::first;

    /// Returns the Python for version 3.12 if these programs work.
    fn chosen(working: &[&str]) -> Option<PathBuf> {
        let versions = ["3.1.12", "3.11.7", "3.12.1", "3.13.0", "3.13.0t"];
        let pyenv = versions.map(|name| (name.to_owned(), Path::new("versions").join(name)));
        first("3.12", &pyenv, |program| {
            working.iter().any(|works| Path::new(works) == program)
        })
    }

    #[test]
    fn the_oldest_python_that_works_is_chosen() {
        let in_pyenv = "versions/3.12.1/bin/python3.12";
        let newer = "versions/3.13.0/bin/python3.13";
        let all = ["python3.12", in_pyenv, "python3.13", newer, "python3.14"];
        for from in 0..all.len() {
            assert_eq!(chosen(&all[from..]), Some(PathBuf::from(all[from])));
        }
    }

    #[test]
    fn older_and_unusual_pythons_are_not_chosen() {
        let others = [
            "python3",
            "python3.11",
            "versions/3.11.7/bin/python3.11",
            "versions/3.13.0t/bin/python3.13",
        ];
        assert_eq!(chosen(&others), None);
    }
}
