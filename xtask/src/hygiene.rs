//! Checks for long files, developer paths, banned words and unknown test names.

use std::{
    env,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use crate::Result;

/// The maximum number of lines per file; the guideline is 500.
const MAX_LINES: usize = 600;

/// Folders with generated files.
const GENERATED: [&str; 6] = [
    ".git",
    "target",
    "corpus",
    "artifacts",
    "node_modules",
    "__pycache__",
];

/// Words that hide the actor of a sentence, and metaphors; CONTRIBUTING lists the alternatives.
const BANNED: [&str; 12] = [
    "whoever",
    "whom",
    "nobody",
    "somebody",
    "is told",
    "are told",
    "one's own",
    "door",
    "trail",
    "retell",
    "doubt",
    "kin",
];

/// The table that maps each specified behaviour to its tests.
const TABLE: &str = "tests/README.md";

/// Users inside boxes and images; their homes are not developer paths.
const KNOWN_HOMES: [&str; 6] = ["agent", "box", "gem", "guest", "sandbox", "user"];

/// Reads every file under `root`, and fails with all findings.
pub(crate) fn check(root: &Path) -> Result {
    let private = private_paths(root, env::var_os("HOME").as_deref().map(Path::new));
    let mut findings = Vec::new();
    for path in files(root)? {
        let bytes = fs::read(&path)?;
        let Ok(text) = std::str::from_utf8(&bytes) else {
            continue;
        };
        let name = path.strip_prefix(root).unwrap_or(&path).display();
        let lines = text.lines().count();
        if path.extension().is_some_and(|extension| extension == "rs") && lines > MAX_LINES {
            findings.push(format!("  {name}: {lines} lines, at most {MAX_LINES}"));
        }
        let is_checked = is_prose(&path);
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = is_checked.then(|| banned_word(line)).flatten() {
                findings.push(format!(
                    "  {name}:{}: `{word}`; name the actor, use the noun of the field",
                    number + 1
                ));
            }
            if let Some(found) = private_path(line, &private) {
                findings.push(format!(
                    "  {name}:{}: a developer's path, `{found}`",
                    number + 1
                ));
            }
        }
    }
    findings.extend(unknown_tests(root)?);
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!("hygiene:\n{}", findings.join("\n")).into())
}

/// Returns whether a file is checked for banned words.
///
/// The list of words and the guide that explains it are exempt.
fn is_prose(path: &Path) -> bool {
    let is_text = ["rs", "md", "toml", "py"]
        .map(OsStr::new)
        .contains(&path.extension().unwrap_or_default());
    is_text && !path.ends_with("hygiene.rs") && !path.ends_with("CONTRIBUTING.md")
}

/// Returns the first banned word of a line, ignoring case.
fn banned_word(line: &str) -> Option<&'static str> {
    let line = line.to_lowercase();
    // `nobody` is also a user name, as in `"nobody"` and `nobody:x:65534`.
    let is_part = |character: char| character.is_alphanumeric() || "_-:\"".contains(character);
    BANNED.into_iter().find(|word| {
        line.match_indices(word).any(|(start, _)| {
            !line[..start].ends_with(is_part) && !line[start + word.len()..].starts_with(is_part)
        })
    })
}

/// Returns tests that the table names and no source defines.
fn unknown_tests(root: &Path) -> io::Result<Vec<String>> {
    let table = fs::read_to_string(root.join(TABLE))?;
    let mut sources = String::new();
    for path in files(root)? {
        let is_source = |extension| extension == "rs" || extension == "py";
        if path.extension().is_some_and(is_source) {
            sources.push_str(&fs::read_to_string(&path)?);
        }
    }
    let is_missing = |name: &&str| {
        let definitions = ["fn", "def"].map(|keyword| format!("{keyword} {name}("));
        !definitions.iter().any(|it| sources.contains(it))
    };
    let missing = named_tests(&table).filter(is_missing);
    Ok(missing
        .map(|name| format!("  {TABLE}: there is no test `{name}`"))
        .collect())
}

/// Returns the last segments of the paths in a table.
fn named_tests(table: &str) -> impl Iterator<Item = &str> {
    let words = table.split('`').skip(1).step_by(2);
    let names = words.filter_map(|word| Some(word.rsplit_once("::")?.1));
    // Some paths name a whole module of tests.
    names.filter(|name| *name != "tests")
}

/// Returns every handwritten file below `folder`, in a stable order.
pub(crate) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                if !GENERATED.iter().any(|name| entry.file_name() == *name) {
                    folders.push(entry.path());
                }
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the paths of this clone and of this user's toolchain.
///
/// A root such as `/src` is too common a word to search for.
fn private_paths(root: &Path, home: Option<&Path>) -> Vec<String> {
    let mut paths = Vec::new();
    if root.components().count() > 2 {
        paths.push(root.display().to_string());
    }
    if let Some(home) = home {
        paths.extend([".cargo", ".rustup"].map(|name| home.join(name).display().to_string()));
    }
    paths
}

fn private_path<'a>(line: &'a str, private: &'a [String]) -> Option<&'a str> {
    let known = private.iter().find(|path| contains_path(line, path));
    known.map(String::as_str).or_else(|| someones_home(line))
}

/// Returns whether a line contains `path` or a path below it, as whole segments.
fn contains_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(start, _)| {
        let longer = |character: char| character.is_alphanumeric() || "-_.".contains(character);
        !line[start + path.len()..].starts_with(longer)
    })
}

fn someones_home(line: &str) -> Option<&str> {
    ["/home/", "/Users/"].iter().find_map(|parent| {
        line.match_indices(parent).find_map(|(start, _)| {
            let name_start = start + parent.len();
            let name = line[name_start..]
                .split(|character: char| {
                    !character.is_ascii_alphanumeric() && !"-_.".contains(character)
                })
                .next()
                .filter(|name| !name.is_empty() && !KNOWN_HOMES.contains(name))?;
            let path = &line[start..name_start + name.len()];
            // `/home/x` alone may be any text; a path below it names a user's file.
            line[start + path.len()..].starts_with('/').then_some(path)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{banned_word, contains_path, named_tests, private_paths, someones_home};

    #[test]
    fn a_banned_word_is_found_as_a_word_only() {
        assert_eq!(banned_word("Whoever asks."), Some("whoever"));
        assert_eq!(banned_word("the client is told so"), Some("is told"));
        assert_eq!(banned_word("nobody_else, wholly, this tolden"), None);
    }

    #[test]
    fn a_home_of_an_unknown_user_is_found() {
        let line = ["see /ho", "me/ann/src/x.rs"].concat();
        assert_eq!(someones_home(&line), Some(&line[4..13]));
    }

    #[test]
    fn homes_of_users_inside_boxes_are_allowed() {
        assert_eq!(someones_home("cd /home/user/x && ls /home/gem/y"), None);
    }

    #[test]
    fn routes_that_end_like_a_home_are_allowed() {
        assert_eq!(someones_home("GET /v1/home/<name> or /home/x"), None);
    }

    #[test]
    fn the_clone_is_found_but_not_a_name_that_begins_the_same() {
        assert!(contains_path("at /srv/code/x.rs:3", "/srv/code"));
        assert!(!contains_path("at /srv/codec/x.rs:3", "/srv/code"));
    }

    #[test]
    fn tests_are_named_by_the_last_part_of_their_path() {
        let table = "| `seed` | `box-x`: `a::b::one`, `…::two` (real) |";
        assert_eq!(named_tests(table).collect::<Vec<_>>(), ["one", "two"]);
    }

    #[test]
    fn a_short_root_is_not_searched_for() {
        let home = Path::new("/h");
        assert_eq!(
            private_paths(Path::new("/src"), Some(home)),
            ["/h/.cargo", "/h/.rustup"]
        );
    }
}
