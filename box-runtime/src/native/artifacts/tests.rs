use std::os::unix::fs::symlink;

use serde_json::json;

use super::*;

fn sha(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Tree with two files, its manifest and its mount.
struct Fixture {
    root: tempfile::TempDir,
    manifest: serde_json::Value,
}

impl Fixture {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("tree/deep/er")).unwrap();
        std::fs::write(root.path().join("tree/SKILL.md"), "how to").unwrap();
        std::fs::write(root.path().join("tree/deep/er/run"), "#!/bin/sh\n").unwrap();
        std::fs::write(root.path().join("tree/beside"), "not named").unwrap();
        let manifest = json!({"algorithm": ALGORITHM, "total_bytes": 16, "files": [
            {"path": "SKILL.md", "size": 6, "sha256": sha(b"how to"), "executable": false},
            {"path": "deep/er/run", "size": 10, "sha256": sha(b"#!/bin/sh\n"), "executable": true},
        ]});
        Self { root, manifest }
    }

    /// Computes the digest like a publisher: over the sorted, compact text.
    fn mount(&self) -> BoxMountSpec {
        let path = self.root.path().join("manifest.json");
        std::fs::write(&path, serde_json::to_string_pretty(&self.manifest).unwrap()).unwrap();
        let digest = format!("sha256:{}", sha(self.manifest.to_string().as_bytes()));
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        BoxMountSpec::content_addressed(text(&self.tree()), "/opt/a", digest, text(&path)).unwrap()
    }

    fn tree(&self) -> PathBuf {
        self.root.path().join("tree")
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("dir")
    }

    fn copy(&self, mount: &BoxMountSpec) -> Result<PathBuf, Reason> {
        let source = File::open(self.tree()).unwrap();
        copy(mount, source.as_fd(), &self.dir())?;
        let digest = mount.content_digest.as_deref().unwrap();
        Ok(self.dir().join(&digest["sha256:".len()..]))
    }

    fn refused(&self) -> Reason {
        let why = self.copy(&self.mount()).unwrap_err();
        // A failed copy leaves nothing behind.
        let left = std::fs::read_dir(self.dir()).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{why}");
        why
    }
}

#[test]
fn only_files_of_the_manifest_are_copied() {
    let fixture = Fixture::new();
    let mount = fixture.mount();
    let copied = fixture.copy(&mount).unwrap();
    let bits = |path: &str| {
        std::fs::metadata(copied.join(path))
            .unwrap()
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(
        std::fs::read_to_string(copied.join("SKILL.md")).unwrap(),
        "how to"
    );
    assert_eq!(
        (bits("SKILL.md"), bits("deep/er/run"), bits("deep/er")),
        (0o444, 0o555, 0o755)
    );
    assert!(!copied.join("beside").exists());
    // Later changes of the source are neither visible nor copied again.
    std::fs::write(fixture.tree().join("SKILL.md"), "harm").unwrap();
    assert_eq!(fixture.copy(&mount).unwrap(), copied);
    assert_eq!(
        std::fs::read_to_string(copied.join("SKILL.md")).unwrap(),
        "how to"
    );
}

#[test]
fn a_source_that_differs_from_its_digest_is_refused() {
    let fixture = Fixture::new();
    std::fs::write(fixture.tree().join("SKILL.md"), "how ta").unwrap();
    assert_eq!(fixture.refused(), "the source changed: SKILL.md");
    std::fs::write(fixture.tree().join("SKILL.md"), "how to and more").unwrap();
    assert_eq!(fixture.refused(), "the source changed: SKILL.md");
    std::fs::remove_file(fixture.tree().join("SKILL.md")).unwrap();
    assert_eq!(fixture.refused(), "the source changed: SKILL.md");
    // A symlink to identical content is not accepted as the file.
    std::fs::write(fixture.root.path().join("same"), "how to").unwrap();
    symlink("../same", fixture.tree().join("SKILL.md")).unwrap();
    assert_eq!(fixture.refused(), "the source changed: SKILL.md");
    std::fs::remove_file(fixture.tree().join("SKILL.md")).unwrap();
    std::fs::create_dir(fixture.tree().join("SKILL.md")).unwrap();
    assert_eq!(fixture.refused(), "the source changed: SKILL.md");
}

#[test]
fn a_manifest_with_another_digest_is_refused() {
    let fixture = Fixture::new();
    let mount = fixture.mount();
    let other = Fixture {
        manifest: json!({"algorithm": ALGORITHM, "total_bytes": 0, "files": []}),
        root: fixture.root,
    };
    other.mount();
    let why = other.copy(&mount).unwrap_err();
    assert_eq!(why, "the manifest does not match content_digest");
}

#[test]
fn invalid_manifests_are_refused() {
    let entry =
        |path: &str| json!({"path": path, "size": 0, "sha256": sha(b""), "executable": false});
    let of = |files: Vec<serde_json::Value>| json!({"algorithm": ALGORITHM, "total_bytes": 0, "files": files});
    let unsafe_path = "the manifest contains an unsafe path";
    for (manifest, why) in [
        (json!([]), "the manifest has an invalid shape"),
        (
            json!({"algorithm": ALGORITHM, "files": []}),
            "the manifest has an invalid shape",
        ),
        (
            json!({"algorithm": "md5", "files": [], "total_bytes": 0}),
            "the manifest uses an unsupported algorithm",
        ),
        (
            json!({"algorithm": ALGORITHM, "files": [], "total_bytes": 1}),
            "the manifest contains an invalid total size",
        ),
        (of(vec![entry(""), entry("a")]), unsafe_path),
        (of(vec![entry("/etc/passwd")]), unsafe_path),
        (of(vec![entry("a/../../b")]), unsafe_path),
        (of(vec![entry("a/./b")]), unsafe_path),
        (of(vec![entry("a//b")]), unsafe_path),
        (of(vec![entry("a\\b")]), unsafe_path),
        (of(vec![entry("a"), entry("a")]), unsafe_path),
        (
            of((0..=MAX_FILES).map(|n| entry(&n.to_string())).collect()),
            "the manifest contains too many files",
        ),
    ] {
        let fixture = Fixture {
            manifest,
            ..Fixture::new()
        };
        assert_eq!(fixture.refused(), why);
    }
    let large = json!({"algorithm": ALGORITHM, "total_bytes": BYTES + 1, "files":
        [{"path": "a", "size": BYTES + 1, "sha256": sha(b""), "executable": false}]});
    let fixture = Fixture {
        manifest: large,
        ..Fixture::new()
    };
    assert_eq!(
        fixture.refused(),
        "the manifest contains an invalid total size"
    );
}

#[test]
fn a_manifest_must_be_a_regular_file() {
    let fixture = Fixture::new();
    let mut mount = fixture.mount();
    let pipe = fixture.root.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
    std::fs::write(fixture.root.path().join("long"), vec![b' '; 4 << 20 | 1]).unwrap();
    std::fs::write(fixture.root.path().join("bad"), "{").unwrap();
    symlink("manifest.json", fixture.root.path().join("link")).unwrap();
    for (name, why) in [
        ("pipe", "the manifest is not a regular file"),
        ("tree", "the manifest is not a regular file"),
        ("none", "the manifest cannot be read"),
        ("link", "the manifest cannot be read"),
        ("long", "the manifest is too large"),
        ("bad", "the manifest is invalid JSON"),
    ] {
        let path = fixture.root.path().join(name).to_str().unwrap().to_owned();
        mount.manifest_path = Some(path);
        assert_eq!(fixture.copy(&mount).unwrap_err(), why);
    }
}

#[test]
fn the_artifacts_of_a_box_are_limited() {
    let fixture = Fixture::new();
    let filler = fixture.dir().join("filler");
    std::fs::create_dir_all(&filler).unwrap();
    let full = File::create(filler.join("sparse")).unwrap();
    let limit = "the box holds the maximum of mounted content; create a new box";
    full.set_len(BYTES - 15).unwrap();
    assert_eq!(fixture.copy(&fixture.mount()).unwrap_err(), limit);
    full.set_len(BYTES - 16).unwrap();
    assert!(fixture.copy(&fixture.mount()).is_ok());
    let many = Fixture::new();
    for number in 0..MAX_ARTIFACTS {
        std::fs::create_dir_all(many.dir().join(number.to_string())).unwrap();
    }
    assert_eq!(many.copy(&many.mount()).unwrap_err(), limit);
}

#[test]
fn directories_of_dead_processes_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let (dead, alive) = (
        root.path().join("boxd-artifacts-a"),
        root.path().join("boxd-artifacts-b"),
    );
    for dir in [&dead, &alive, &root.path().join("other")] {
        std::fs::create_dir_all(dir.join("x")).unwrap();
    }
    let lock = File::open(&alive).unwrap();
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    sweep(root.path(), SCRATCH);
    assert!(!dead.exists() && alive.join("x").exists() && root.path().join("other/x").exists());
}

#[test]
fn a_new_directory_is_not_taken_for_one_of_a_dead_process() {
    let root = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let made = TemporaryDirectory::new(root.path(), SCRATCH, None).unwrap();
                    assert!(made.path().is_dir());
                }
            });
        }
    });
}
