//! Pulls of a Debian image beside skopeo and umoci.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;
use box_image::{Limits, PullOptions, Reference, RegistryOptions, Store};

use crate::debian;
use crate::native::spawn;
use crate::pairs::Pairs;

/// The number of pulls of each contestant per round.
const PULLS: usize = 3;

/// Runs the measurement and prints its bar.
pub(crate) fn run(rounds: u32) -> Result<()> {
    let registry = debian::Registry::start()?;
    crate::report::heading();
    let mut pairs = Pairs::default();
    // All folders stay until the end: ext4 searches long for an inode after many were freed.
    let mut folders = Vec::new();
    for _ in 0..rounds {
        for _ in 0..PULLS {
            written()?;
            let folder = tempfile::tempdir()?;
            let begun = Instant::now();
            pull(&registry.image, folder.path())?;
            pairs.ours(begun);
            folders.push(folder);
            written()?;
            let folder = tempfile::tempdir()?;
            let begun = Instant::now();
            registry.copy_and_unpack(folder.path())?;
            pairs.theirs(begun);
            folders.push(folder);
        }
        pairs.end_round();
    }
    let name = "pull and unpack of a Debian image with Python";
    pairs.print(name, "skopeo copy and umoci unpack", 0.5);
    Ok(())
}

/// Waits until the disk has all that was written before.
///
/// Our store waits for the disk at the end of a pull, and would wait for the files of the peers, too.
fn written() -> Result<()> {
    spawn(&mut Command::new("sync"))
}

/// Pulls the image into a new store, as `boxd image pull` does.
fn pull(image: &str, folder: &Path) -> Result<()> {
    let store = Store::open(folder, Limits::default())?;
    let registry = box_image::Registry::new(RegistryOptions::default())?;
    let reference: Reference = image.parse()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let options = PullOptions::default();
    runtime.block_on(box_image::pull(&store, &registry, &reference, &options))?;
    Ok(())
}
