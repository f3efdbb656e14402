//! Tells the program which commit it was built from, and what it can do.

use std::process::Command;

fn main() {
    let output = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output();
    let commit = output
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned());
    // Not BOXD_…, which are keys of the configuration: cargo also sets these for programs that it runs.
    println!("cargo::rustc-env=BUILT_FROM_COMMIT={commit}");
    println!(
        "cargo::rustc-env=BUILT_WITH_FEATURES=native, json-rpc, langbot, unix, tcp, tls, ws, http"
    );
    // A commit moves this file; without a repository there is none to watch.
    println!("cargo::rerun-if-changed=../.git/logs/HEAD");
}
