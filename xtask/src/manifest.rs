//! Cargo's metadata of the workspace's packages.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{
    Result,
    command::{self, Workspace},
};

/// One package of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// All dependencies of any kind, under the names that the sources use.
    pub(crate) dependencies: Vec<String>,
}

/// The workspace as `cargo metadata` describes it.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) packages: Vec<Package>,
    pub(crate) target: PathBuf,
    /// The oldest supported compiler, as the packages declare it.
    pub(crate) rust_version: String,
}

impl Manifest {
    pub(crate) fn read(workspace: &Workspace) -> Result<Self> {
        let mut cargo = workspace.cargo("metadata --no-deps --format-version 1");
        let metadata: Value = serde_json::from_str(&command::output(&mut cargo)?)?;
        let packages = list(&metadata, "packages")?
            .iter()
            .map(package)
            .collect::<Result<Vec<_>>>()?;
        let rust_version = list(&metadata, "packages")?
            .first()
            .ok_or("the workspace has no packages")
            .map(|package| text(package, "rust_version"))??
            .to_owned();
        Ok(Self {
            packages,
            rust_version,
            target: text(&metadata, "target_directory")?.into(),
        })
    }
}

fn package(value: &Value) -> Result<Package> {
    let folder = Path::new(text(value, "manifest_path")?)
        .parent()
        .ok_or("a manifest without a folder")?;
    let dependencies = list(value, "dependencies")?
        .iter()
        .map(|dependency| {
            let name = text(dependency, "rename").or_else(|_| text(dependency, "name"))?;
            Ok(name.to_owned())
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Package {
        name: text(value, "name")?.to_owned(),
        folder: folder.to_owned(),
        dependencies,
    })
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    let text = value.get(field).and_then(Value::as_str);
    Ok(text.ok_or_else(|| format!("cargo metadata has no text `{field}`"))?)
}

fn list<'a>(value: &'a Value, field: &str) -> Result<&'a [Value]> {
    let list = value.get(field).and_then(Value::as_array);
    Ok(list.ok_or_else(|| format!("cargo metadata has no list `{field}`"))?)
}
