//! Python packages of other protocols, and our scripts that use them.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

/// Returns the Python interpreter with the packages of a suite, which `cargo xtask test` installs.
///
/// The environment variable `SUITE_PYTHON` names another one.
pub(crate) fn python(suite: &str, version: &str) -> Result<PathBuf> {
    let variable = format!("{}_PYTHON", suite.to_uppercase());
    let named = env::var_os(&variable).map(PathBuf::from);
    let program = named.unwrap_or_else(|| {
        let own = env::current_exe().unwrap_or_default();
        let target = own.ancestors().nth(2).unwrap_or(Path::new("target"));
        target.join(format!("tools/{suite}-{version}/bin/python"))
    });
    ensure!(
        program.is_file(),
        "the packages of {suite} {version} are not installed: `cargo xtask test {suite}` installs them, {variable} names \
         another Python"
    );
    Ok(program)
}

/// Returns the path of a script in a folder of this crate.
pub(crate) fn script(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(folder)
        .join(name)
}
