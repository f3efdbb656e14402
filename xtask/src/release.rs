//! Checks of the release binary, and of every command in the README.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Result,
    command::{self, Workspace},
    picture,
};

/// The maximum size of the binary.
const MOST: u64 = 20 << 20;

/// The shell prelude of each README block.
///
/// It replaces some `cargo` commands, and ends background jobs at exit.
const BEFORE: &str = r#"set -eu
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
cargo() {
    case "$1" in
        # As it stands there, but for the profile: cargo itself changes what a program finds in its environment.
        run) while [ "$1" != -- ]; do shift; done; command cargo run --quiet --manifest-path "$WORKSPACE" "$@" ;;
        # What this is part of, what takes as long as that, and what was just built.
        xtask | install) ;;
        *) command cargo "$@" ;;
    esac
}
"#;

/// Builds the binary, checks its size, and runs the README with it.
pub(crate) fn check(workspace: &Workspace, target: &Path) -> Result {
    let program = build(workspace, target)?;
    let size = fs::metadata(&program)?.len();
    println!("boxd: {size} bytes, static");
    if size > MOST {
        return Err(format!("boxd has {size} bytes; {MOST} are allowed").into());
    }
    // A profile override of one package has made cargo keep the symbols before.
    if has_symbols(&fs::read(&program)?) {
        return Err("boxd is not stripped of its symbols".into());
    }
    let linked = command::output(&mut workspace.program("ldd", &program.display().to_string()));
    if linked.is_ok_and(|text| text.contains("=>")) {
        return Err("boxd is not static".into());
    }
    readme(workspace, target, &program)?;
    picture::check(workspace, target, &program)
}

/// Runs the README with the binary that the tests have built.
pub(crate) fn readme_only(workspace: &Workspace, target: &Path) -> Result {
    command::status(&mut workspace.cargo("build --package boxd"))?;
    let program = target.join("debug/boxd");
    readme(workspace, target, &program)?;
    picture::check(workspace, target, &program)
}

/// Returns whether a 64-bit ELF file has a symbol table.
fn has_symbols(program: &[u8]) -> bool {
    const KIND_SYMBOLS: [u8; 4] = 2_u32.to_le_bytes();
    let number = |place: usize, length: usize| {
        let bytes = program.get(place..place + length).unwrap_or_default();
        let digits = bytes.iter().rev();
        digits.fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    };
    let (sections, size, count) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2));
    (0..count).any(|section| {
        let kind = sections + section * size + 4;
        program.get(kind..kind + 4) == Some(&KIND_SYMBOLS)
    })
}

/// Builds the release binary.
pub(crate) fn build(workspace: &Workspace, target: &Path) -> Result<PathBuf> {
    let triple = host(workspace)?;
    let mut cargo = workspace.cargo("build --profile dist --package boxd --target");
    cargo
        .arg(&triple)
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    command::status(&mut cargo)?;
    Ok(target.join(triple).join("dist/boxd"))
}

/// Returns the target triple of this machine.
fn host(workspace: &Workspace) -> Result<String> {
    let text = command::output(&mut workspace.program("rustc", "-vV"))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc names no host")?.to_owned())
}

/// Runs every block of shell commands, each in a separate directory.
fn readme(workspace: &Workspace, target: &Path, program: &Path) -> Result {
    let text = fs::read_to_string(workspace.root().join("README.md"))?;
    let blocks = blocks(&text);
    if blocks.is_empty() {
        return Err("the README has no commands".into());
    }
    for (number, block) in blocks.iter().enumerate() {
        let place = target.join("readme").join(number.to_string());
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(&place)?;
        let programs = place.join("bin");
        fs::create_dir(&programs)?;
        std::os::unix::fs::symlink(program, programs.join("boxd"))?;
        let path = std::env::var("PATH").unwrap_or_default();
        println!("README, block {}:\n{block}", number + 1);
        let mut shell = workspace.program("timeout", "120 bash -c");
        shell
            .arg(format!("{BEFORE}{block}"))
            .current_dir(&place)
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("WORKSPACE", workspace.root().join("Cargo.toml"))
            .env("CARGO_TARGET_DIR", target)
            .env("BOXD_SERVER_STATE_DIR", place.join("state"));
        command::status(&mut shell)?;
    }
    Ok(())
}

/// Returns the blocks of shell commands.
fn blocks(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line == "```sh" {
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            found.push(block.join("\n"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_that_were_left_in_are_found() {
        // The test binary has symbols for its backtraces.
        let own = std::env::current_exe().and_then(fs::read).unwrap();
        assert!(has_symbols(&own));
        assert!(!has_symbols(b"\x7fELF"));
    }

    #[test]
    fn blocks_of_commands_are_found() {
        let text = "a\n```sh\nx\ny\n```\n```rust\nz\n```\n```sh\nw\n```\n";
        assert_eq!(blocks(text), ["x\ny", "w"]);
    }
}
