//! Builds with the oldest supported compiler, and with combinations of features.

use std::path::Path;

use crate::{
    Result,
    command::{self, Workspace},
    manifest::Manifest,
};

/// Crates with features, in the combinations that a user may choose.
const FEATURES: [&str; 7] = [
    "--package box-runtime --no-default-features",
    "--package box-runtime --no-default-features --features fake",
    "--package box-protocol --features schema",
    "--package box-rpc --features fuzzing,schema",
    "--package box-runtime --features fuzzing",
    "--package box-transports --features fuzzing",
    "--package box-agent --features fuzzing",
];

/// Checks the workspace with its `rust-version`, and each combination of features.
pub(crate) fn check(workspace: &Workspace, target: &Path) -> Result {
    let oldest = Manifest::read(workspace)?.rust_version;
    let install = format!("toolchain install {oldest} --profile minimal --no-self-update");
    command::status(&mut workspace.program("rustup", &install))?;
    // A separate folder, because the artefacts of two compilers would replace each other.
    let folder = target.join("oldest");
    let mut cargo = workspace.program("rustup", &format!("run {oldest} cargo check --workspace"));
    command::status(cargo.arg("--target-dir").arg(&folder))?;
    for features in FEATURES {
        let mut cargo =
            workspace.program("rustup", &format!("run {oldest} cargo check {features}"));
        command::status(cargo.arg("--target-dir").arg(&folder))?;
    }
    println!("rust {oldest}, {} combinations of features", FEATURES.len());
    Ok(())
}
