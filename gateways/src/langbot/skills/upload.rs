//! Skills that come in an archive: what would be installed, and installing it.

use std::fs;
use std::path::{Path, PathBuf};

use super::store::{SCANNED, Skill, Store, load, scan};
use super::tree::{self, normal};
use super::{Why, archive};

/// What an upload is asked for beside the file.
#[derive(Debug, Default)]
pub(super) struct Upload {
    pub(super) filename: String,
    pub(super) source_subdir: String,
    pub(super) suffix: String,
    pub(super) source_paths: Vec<String>,
}

impl Store {
    /// The skills of an archive, as they would be installed.
    pub(super) fn preview(&self, file: &[u8], upload: &Upload) -> Result<Vec<Skill>, Why> {
        self.unpacked(file, upload, |_, previews| Ok(previews))
    }

    pub(super) fn install(&self, file: &[u8], upload: &Upload) -> Result<Vec<Skill>, Why> {
        self.unpacked(file, upload, |root, previews| {
            let chosen = chosen(previews, &upload.source_paths)?;
            let mut made: Vec<PathBuf> = Vec::new();
            let moved = chosen.iter().try_for_each(|skill| {
                let target = PathBuf::from(&skill.package_root);
                if made.contains(&target) {
                    return Err(format!(
                        "Duplicate target directory selected: {}",
                        target.display()
                    ));
                }
                if target.exists() {
                    return Err(format!(
                        "Skill directory already exists: {}",
                        target.display()
                    ));
                }
                let from = root.join(skill.source_path.as_deref().unwrap_or_default());
                let failed = |error: std::io::Error| {
                    format!("the skill cannot be installed: {}", error.kind())
                };
                fs::create_dir_all(&self.root).map_err(failed)?;
                fs::rename(from, &target).map_err(failed)?;
                made.push(target);
                Ok(())
            });
            let scanned = moved.and_then(|()| {
                made.iter()
                    .map(|target| scan(target))
                    .collect::<Result<Vec<_>, _>>()
            });
            scanned.inspect_err(|_| {
                for target in &made {
                    let _ = fs::remove_dir_all(target);
                }
            })
        })
    }

    /// Unpacks an archive for as long as it is used.
    fn unpacked(
        &self,
        file: &[u8],
        upload: &Upload,
        using: impl FnOnce(&Path, Vec<Skill>) -> Result<Vec<Skill>, Why>,
    ) -> Result<Vec<Skill>, Why> {
        // Whatever an earlier process has left.
        let _ = fs::remove_dir_all(&self.staging);
        fs::create_dir_all(&self.staging).map_err(|error| error.kind().to_string())?;
        let used = archive::unpack(file, &self.staging)
            .and_then(|root| subdirectory(root, &upload.source_subdir))
            .and_then(|root| {
                let previews = self.previews(&root, upload)?;
                using(&root, previews)
            });
        let _ = fs::remove_dir_all(&self.staging);
        used
    }

    fn previews(&self, root: &Path, upload: &Upload) -> Result<Vec<Skill>, Why> {
        let found = tree::discover(root, SCANNED)?;
        if found.is_empty() {
            return Err(
                "No SKILL.md found in the archive or its subdirectories (max depth: 2)".to_owned(),
            );
        }
        let stem = stem(&upload.filename);
        let mut previews = found
            .into_iter()
            .map(|(directory, entry)| {
                let mut skill = load(&directory, entry)?;
                let source = directory.strip_prefix(root).unwrap_or(Path::new(""));
                let leaf = source
                    .file_name()
                    .map(|leaf| leaf.to_string_lossy().into_owned());
                let mut target = stem.clone();
                if let Some(leaf) = leaf.filter(|leaf| *leaf != stem) {
                    target = format!("{target}-{leaf}");
                }
                if !upload.suffix.is_empty() {
                    target = format!("{target}-{}", upload.suffix);
                }
                if target.contains(['/', '\\', '\0']) {
                    return Err("target_suffix must be no path".to_owned());
                }
                skill.source_path = Some(source.display().to_string());
                skill.package_root = self.root.join(target).display().to_string();
                Ok(skill)
            })
            .collect::<Result<Vec<_>, Why>>()?;
        previews.sort_by(|one, other| one.source_path.cmp(&other.source_path));
        Ok(previews)
    }
}

/// Those of an archive's skills that were asked for; the only one need not be.
fn chosen(previews: Vec<Skill>, asked: &[String]) -> Result<Vec<Skill>, Why> {
    let source = |skill: &Skill| skill.source_path.clone().unwrap_or_default();
    let all = || {
        let named = previews.iter().map(|skill| match source(skill) {
            path if path.is_empty() => ".".to_owned(),
            path => path,
        });
        named.collect::<Vec<_>>().join(", ")
    };
    if asked.is_empty() {
        return if previews.len() == 1 {
            Ok(previews)
        } else {
            Err(format!(
                "Multiple skills found. Please choose one or more source_paths: {}",
                all()
            ))
        };
    }
    let mut chosen: Vec<Skill> = Vec::new();
    for path in asked {
        let found = previews.iter().find(|skill| source(skill) == *path);
        let Some(found) = found else {
            return Err(format!(
                "Invalid source_path \"{path}\". Available: {}",
                all()
            ));
        };
        if chosen.iter().all(|skill| source(skill) != *path) {
            chosen.push(found.clone());
        }
    }
    Ok(chosen)
}

/// A path in an archive, without the slashes around it.
pub(super) fn slashes(path: &str) -> String {
    path.trim().replace('\\', "/").trim_matches('/').to_owned()
}

fn subdirectory(root: PathBuf, asked: &str) -> Result<PathBuf, Why> {
    let asked = slashes(asked);
    let inside = normal(&asked).ok_or("source_subdir must stay within the uploaded archive")?;
    if inside.as_os_str().is_empty() {
        return Ok(root);
    }
    // Archives with links are refused, so what is below is inside.
    let place = root.join(inside);
    if place.is_dir() {
        return Ok(place);
    }
    Err(format!(
        "source_subdir does not exist in the uploaded archive: {asked}"
    ))
}

/// What a directory is called after its archive.
fn stem(filename: &str) -> String {
    let stem = Path::new(filename.trim()).file_stem().unwrap_or_default();
    let safe: String = stem
        .to_string_lossy()
        .chars()
        .map(|c| {
            if c.is_alphanumeric() || matches!(c, '-' | '_') {
                c
            } else {
                '-'
            }
        })
        .collect();
    match safe.trim_matches(['-', '_']) {
        "" => "uploaded-skill".to_owned(),
        safe => safe.to_owned(),
    }
}
