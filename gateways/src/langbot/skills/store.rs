//! The skills of one workspace, on disk: each a directory with a `SKILL.md`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Why;
use super::front;
use super::tree::{self, TEXT_BYTES, normal, real};
use crate::langbot::actions::as_text;
use crate::langbot::admission::Micros;

/// How deep skills lie in the store, and in what is scanned.
const STORED: usize = 6;
pub(super) const SCANNED: usize = 2;

/// The most that is told of all texts, and of one directory.
const LISTED_BYTES: usize = 16 * 1024 * 1024;
const LISTED: usize = 1_000;
const IN_DIRECTORY: usize = 10_000;

/// Files that make a skill a project of Python's.
const PYTHON: [&str; 4] = [
    "requirements.txt",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
];

/// A skill as LangBot reads it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Skill {
    name: String,
    display_name: String,
    description: String,
    instructions: String,
    pub(super) package_root: String,
    entry_file: &'static str,
    python_project: bool,
    created_at: String,
    updated_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) source_path: Option<String>,
}

/// The skills of one workspace.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) root: PathBuf,
    /// Where archives are unpacked; nothing is there between two calls.
    pub(super) staging: PathBuf,
}

impl Store {
    /// The store below `skills` of the workspace with this namespace.
    pub(super) fn new(skills: &Path, namespace: &str) -> Self {
        let skills = real(skills);
        Self {
            root: skills.join("tenants").join(namespace),
            staging: skills.join(".staging").join(namespace),
        }
    }

    pub(super) fn list(&self) -> Result<Vec<Skill>, Why> {
        fs::create_dir_all(&self.root).map_err(|error| {
            format!(
                "the skills of the workspace cannot be reached: {}",
                error.kind()
            )
        })?;
        let mut skills = Vec::new();
        let mut bytes = 0;
        for (directory, entry) in tree::discover(&self.root, STORED)? {
            // One that cannot be read hides no other.
            let Ok(skill) = load(&directory, entry) else {
                continue;
            };
            bytes += skill.instructions.len() + skill.description.len() + skill.package_root.len();
            if bytes > LISTED_BYTES {
                return Err("Skill listing exceeds the configured text limit".to_owned());
            }
            skills.push(skill);
        }
        skills.sort_by(|one, other| other.updated_at.cmp(&one.updated_at));
        Ok(skills)
    }

    pub(super) fn get(&self, name: &str) -> Result<Option<Skill>, Why> {
        Ok(self.list()?.into_iter().find(|skill| skill.name == name))
    }

    fn require(&self, name: &str) -> Result<Skill, Why> {
        self.get(name)?
            .ok_or_else(|| format!("Skill \"{name}\" not found"))
    }

    /// The directory of a skill.
    pub(super) fn root_of(&self, name: &str) -> Result<String, Why> {
        let skill = self.require(&valid_name(name)?)?;
        let root = self.within(&skill.package_root, "skill package")?;
        Ok(root.display().to_string())
    }

    pub(super) fn create(&self, data: &Map<String, Value>) -> Result<Skill, Why> {
        let name = valid_name(&text(data, "name"))?;
        if self.get(&name)?.is_some() {
            return Err(format!("Skill with name \"{name}\" already exists"));
        }
        let managed = self.root.join(&name);
        let asked = text(data, "package_root");
        let mut target = managed.clone();
        let mut imported = None;
        let asked = asked.trim();
        if asked.is_empty() || real(Path::new(asked)) == managed {
            fs::create_dir_all(&managed).map_err(|error| error.kind().to_string())?;
        } else {
            // Within the workspace's own, so it is managed already.
            let from = self.within(asked, "package_root")?;
            if !from.is_dir() {
                return Err(format!("Directory does not exist: {}", from.display()));
            }
            target = if from == self.root {
                managed
            } else {
                from.clone()
            };
            if target != from {
                if target.exists() {
                    return Err(format!(
                        "Skill directory already exists: {}",
                        target.display()
                    ));
                }
                tree::copy(&from, &target)?;
            }
            let entry = tree::entry_file(&target)
                .ok_or_else(|| format!("No SKILL.md found in {}", target.display()))?;
            imported = Some(load(&target, entry)?);
        }
        let field = |field: &str, of: fn(&Skill) -> &str| {
            let said = data.get(field).map(as_text).unwrap_or_default();
            match &imported {
                Some(imported) if said.trim().is_empty() => of(imported).to_owned(),
                _ => said,
            }
        };
        let display_name = field("display_name", |skill| &skill.display_name);
        let description = field("description", |skill| &skill.description);
        let instructions = field("instructions", |skill| &skill.instructions);
        write_head(&target, &name, &display_name, &description, &instructions)?;
        self.get(&name)?
            .ok_or_else(|| format!("Failed to create skill \"{name}\""))
    }

    pub(super) fn update(&self, name: &str, data: &Map<String, Value>) -> Result<Skill, Why> {
        let skill = self.require(name)?;
        let asked = text(data, "name");
        if !asked.trim().is_empty() && asked.trim() != skill.name {
            return Err("Renaming skills is not supported".to_owned());
        }
        let root = text(data, "package_root");
        let elsewhere = real(Path::new(root.trim())) != Path::new(&skill.package_root);
        if !root.trim().is_empty() && elsewhere {
            return Err(
                "Updating package_root is not supported; recreate the skill to import a different package".to_owned(),
            );
        }
        let field =
            |field: &str, now: &str| data.get(field).map_or_else(|| now.to_owned(), as_text);
        write_head(
            Path::new(&skill.package_root),
            &skill.name,
            &field("display_name", &skill.display_name),
            &field("description", &skill.description),
            &field("instructions", &skill.instructions),
        )?;
        self.get(name)?
            .ok_or_else(|| format!("Skill \"{name}\" not found after update"))
    }

    pub(super) fn delete(&self, name: &str) -> Result<(), Why> {
        let skill = self.require(name)?;
        let inside = Path::new(&skill.package_root).strip_prefix(&self.root).ok();
        let top = inside.and_then(|inside| inside.components().next());
        let Some(top) = top else {
            return Err("Only managed skills under the Box skills root can be deleted".to_owned());
        };
        fs::remove_dir_all(self.root.join(top))
            .map_err(|error| format!("the skill cannot be deleted: {}", error.kind()))
    }

    pub(super) fn scan(&self, path: &str) -> Result<Skill, Why> {
        scan(&self.within(path, "scan path")?)
    }

    /// A path of the host that lies in the workspace's own directory, links followed.
    fn within(&self, path: &str, what: &str) -> Result<PathBuf, Why> {
        let found = real(Path::new(path.trim()));
        if !path.trim().is_empty() && found.starts_with(&self.root) {
            return Ok(found);
        }
        Err(format!("{what} must stay within the Workspace skill root"))
    }

    pub(super) fn files(
        &self,
        name: &str,
        path: &str,
        hidden: bool,
        most: usize,
    ) -> Result<Value, Why> {
        if most == 0 {
            return Err("max_entries must be a positive integer".to_owned());
        }
        let most = most.min(LISTED);
        let skill = self.require(name)?;
        let (root, place) = place(&skill, path)?;
        let shown = if place.as_os_str().is_empty() {
            Path::new(".")
        } else {
            &place
        };
        let found = tree::entries(&root, shown, IN_DIRECTORY)?
            .ok_or_else(|| format!("Skill directory not found: {}", path.trim()))?;
        let visible: Vec<_> = found
            .into_iter()
            .filter(|entry| hidden || !entry.name.starts_with('.'))
            .collect();
        let entries: Vec<_> = visible
            .iter()
            .take(most)
            .map(|entry| {
                json!({
                    "path": place.join(&entry.name),
                    "name": entry.name,
                    "is_dir": entry.is_dir,
                    "size": (!entry.is_dir).then_some(entry.size),
                })
            })
            .collect();
        Ok(json!({
            "skill": {"name": skill.name},
            "base_path": shown,
            "entries": entries,
            "truncated": visible.len() > most,
        }))
    }

    pub(super) fn read(&self, name: &str, path: &str) -> Result<Value, Why> {
        let skill = self.require(name)?;
        let (root, place) = place(&skill, path)?;
        let shown = place.display();
        let file =
            tree::file(&root, &place)?.ok_or_else(|| format!("Skill file not found: {shown}"))?;
        let content = tree::text(file, &format!("Skill file {shown}"))?;
        Ok(json!({"skill": {"name": skill.name}, "path": place, "content": content}))
    }

    pub(super) fn write(&self, name: &str, path: &str, content: &str) -> Result<Value, Why> {
        let skill = self.require(name)?;
        let (root, place) = place(&skill, path)?;
        let shown = place.display();
        if content.len() > TEXT_BYTES {
            return Err(format!(
                "Skill file {shown} exceeds the {TEXT_BYTES}-byte limit"
            ));
        }
        tree::write(&root, &place, content).map_err(|why| format!("Skill file {shown}: {why}"))?;
        Ok(json!({"skill": {"name": skill.name}, "path": place, "bytes_written": content.len()}))
    }
}

pub(super) fn scan(path: &Path) -> Result<Skill, Why> {
    let shown = path.display();
    if !path.is_dir() {
        return Err(format!("Directory does not exist: {shown}"));
    }
    match &tree::discover(path, SCANNED)?[..] {
        [] => Err(format!(
            "No SKILL.md found in {shown} or its subdirectories (max depth: 2)"
        )),
        [(directory, entry)] => load(directory, entry),
        many => {
            let all: Vec<_> = many
                .iter()
                .map(|(path, _)| path.display().to_string())
                .collect();
            let all = all.join(", ");
            Err(format!(
                "Multiple skill directories found in {shown}. Please choose a more specific path: {all}"
            ))
        }
    }
}

pub(super) fn load(directory: &Path, entry: &'static str) -> Result<Skill, Why> {
    let directory = real(directory);
    let gone = || format!("Skill entry file {entry} is not there");
    let root = tree::open_root(&directory).map_err(|_| gone())?;
    let file = tree::file(&root, Path::new(entry))?.ok_or_else(gone)?;
    let metadata = file.metadata().map_err(|_| gone())?;
    let content = tree::text(file, &format!("Skill entry file {entry}"))?;
    let (head, instructions) = front::read(&content)?;
    let said = |name: &str| head.get(name).map(|text| text.trim().to_owned());
    let own = directory
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let name = valid_name(&said("name").or(own).unwrap_or_default())?;
    let micros = |seconds: i64, nanos: i64| {
        let micros = seconds
            .saturating_mul(1_000_000)
            .saturating_add(nanos / 1000);
        Micros(u64::try_from(micros).unwrap_or_default()).to_text()
    };
    Ok(Skill {
        display_name: said("display_name").unwrap_or_else(|| name.clone()),
        description: said("description").unwrap_or_default(),
        instructions: instructions.to_owned(),
        entry_file: entry,
        python_project: PYTHON.iter().any(|name| directory.join(name).is_file())
            || directory.join(".venv").is_dir(),
        created_at: micros(metadata.ctime(), metadata.ctime_nsec()),
        updated_at: micros(metadata.mtime(), metadata.mtime_nsec()),
        package_root: directory.display().to_string(),
        source_path: None,
        name,
    })
}

fn write_head(
    root: &Path,
    name: &str,
    display_name: &str,
    description: &str,
    instructions: &str,
) -> Result<(), Why> {
    let members = [
        ("name", name),
        ("display_name", display_name),
        ("description", description),
    ];
    let content = front::write(&members, instructions);
    let root = tree::open_root(root).map_err(|_| "the skill's directory is gone".to_owned())?;
    tree::write(&root, Path::new("SKILL.md"), &content)
}

/// The directory of a skill, opened, and a path in it.
fn place(skill: &Skill, path: &str) -> Result<(std::os::fd::OwnedFd, PathBuf), Why> {
    let path = path.trim();
    if Path::new(path).is_absolute() {
        return Err("path must be relative to the skill package root".to_owned());
    }
    let place = normal(path).ok_or("path must stay within the skill package root")?;
    let root = tree::open_root(Path::new(&skill.package_root));
    let root = root.map_err(|_| format!("Skill \"{}\" has no package_root", skill.name))?;
    Ok((root, place))
}

fn valid_name(name: &str) -> Result<String, Why> {
    let name = name.trim();
    if name.is_empty() {
        return Err("Skill name is required".to_owned());
    }
    let letters = name.chars().filter(|c| !matches!(c, '-' | '_'));
    if letters.clone().next().is_none() || !letters.clone().all(char::is_alphanumeric) {
        return Err(
            "Skill name can only contain letters, numbers, hyphens and underscores".to_owned(),
        );
    }
    if name.chars().count() > 64 {
        return Err("Skill name cannot exceed 64 characters".to_owned());
    }
    Ok(name.to_owned())
}

fn text(data: &Map<String, Value>, name: &str) -> String {
    data.get(name).map(as_text).unwrap_or_default()
}
