//! Imports and exports.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use box_image::{Digest, ExportOptions, ImportFormat, ImportOptions, Reference, Uses};
use box_rpc::Code;
use serde_json::{Value, json};

use super::support::{OCI_MANIFEST, Packed, TestImage, TestStore, names, pack, tar};

fn named(name: &str) -> ImportOptions {
    ImportOptions {
        name: Some(name.parse().unwrap()),
        ..ImportOptions::default()
    }
}

fn write(folder: &Path, name: &str, content: &[u8]) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// The files of a layout; each image has a name in it.
fn layout(images: &[(&TestImage, &str)]) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![(
        "oci-layout".to_owned(),
        br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec(),
    )];
    let mut manifests = Vec::new();
    for (image, name) in images {
        let manifest = image.manifest_bytes();
        manifests.push(json!({
            "mediaType": OCI_MANIFEST, "digest": Digest::of(&manifest), "size": manifest.len(),
            "annotations": {"org.opencontainers.image.ref.name": name}
        }));
        for blob in image
            .layers
            .iter()
            .cloned()
            .chain([image.config_bytes(), manifest])
        {
            files.push((format!("blobs/sha256/{}", Digest::of(&blob).hex()), blob));
        }
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    // Last, as some tools write it.
    files.push(("index.json".to_owned(), index.to_string().into_bytes()));
    files
}

fn tar_of(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let files: Vec<_> = files
        .iter()
        .map(|(name, content)| (name.as_str(), content.as_slice()))
        .collect();
    tar(&files)
}

#[test]
fn an_oci_layout_is_imported_from_a_directory_and_an_archive() {
    let image = TestImage::new(&[
        (tar(&[("a", b"1"), ("b", b"1")]), Packed::Gzip),
        (tar(&[(".wh.a", b"")]), Packed::Zstd),
    ]);
    let files = layout(&[(&image, "evil:latest")]);
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("layout");
    for (name, content) in &files {
        write(&directory, name, content);
    }
    write(folder.path(), "plain.tar", &tar_of(&files));
    write(
        folder.path(),
        "packed.tar.gz",
        &pack(&tar_of(&files), Packed::Gzip),
    );
    for path in ["layout", "plain.tar", "packed.tar.gz"] {
        let at = TestStore::new();
        let imported = at
            .store
            .import(&folder.path().join(path), &named("mine:1"))
            .unwrap();
        assert_eq!(imported.digest, image.digest(), "{path}");
        // CVE-2026-50195: an archive sets no names.
        assert_eq!(imported.names, ["docker.io/library/mine:1"], "{path}");
        assert!(at.store.get("evil").is_err());
        assert_eq!(imported.source, None);
        let root = at.store.rootfs(&imported.digest);
        assert!(root.join("b").exists() && !root.join("a").exists());
        assert_eq!(
            names(&at.path().join("images"), &imported.digest.hex()).len(),
            4,
            "only the files of an image"
        );
        at.assert_clean();
        let unnamed = at
            .store
            .import(&folder.path().join(path), &ImportOptions::default())
            .unwrap();
        assert_eq!(
            unnamed.names.len(),
            1,
            "the known image keeps its name and gets no other"
        );
    }
}

#[test]
fn an_image_of_several_is_selected() {
    let (one, two) = (
        TestImage::small(),
        TestImage::new(&[(tar(&[("x", b"")]), Packed::Plain)]),
    );
    let archive = tar_of(&layout(&[(&one, "one"), (&two, "two")]));
    let at = TestStore::new();
    let error = at
        .store
        .import_stream(&archive[..], &named("mine"))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "import: the file contains 2 images; select one of: one, two"
    );
    for (select, image) in [("two", &two), (&one.digest().to_string(), &one)] {
        let options = ImportOptions {
            select: Some(select.to_owned()),
            ..named("mine")
        };
        assert_eq!(
            at.store
                .import_stream(&archive[..], &options)
                .unwrap()
                .digest,
            image.digest()
        );
    }
    let options = ImportOptions {
        select: Some("three".to_owned()),
        ..named("mine")
    };
    assert_eq!(
        at.store
            .import_stream(&archive[..], &options)
            .unwrap_err()
            .code(),
        Code::NotFound
    );
    let options = named(&format!("mine@{}", one.digest()));
    assert_eq!(
        at.store
            .import_stream(&archive[..], &options)
            .unwrap_err()
            .code(),
        Code::Validation
    );
}

#[test]
fn an_archive_of_docker_save_is_imported() {
    let layers = [tar(&[("a", b"1")]), tar(&[("b", b"2")])];
    let image = TestImage::new(&[
        (layers[0].clone(), Packed::Plain),
        (layers[1].clone(), Packed::Plain),
    ]);
    let config = image.config_bytes();
    let name = format!("{}.json", Digest::of(&config).hex());
    let manifest = |tags: &[&str]| json!([{"Config": name, "RepoTags": tags, "Layers": ["1/layer.tar", "2/layer.tar"]}]);
    let archive = |manifest: Value, config: &[u8], link: bool| {
        let mut builder = tar::Builder::new(Vec::new());
        let mut add = |path: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, path, content).unwrap();
        };
        add("1/layer.tar", &layers[0]);
        if !link {
            add("2/layer.tar", &layers[1]);
        }
        add(&name, config);
        add("manifest.json", manifest.to_string().as_bytes());
        if link {
            // As older versions write a layer that occurs twice.
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            builder
                .append_link(&mut header, "2/layer.tar", "../1/layer.tar")
                .unwrap();
        }
        builder.into_inner().unwrap()
    };
    let at = TestStore::new();
    let imported = at
        .store
        .import_stream(
            &archive(manifest(&["evil:latest"]), &config, false)[..],
            &named("mine"),
        )
        .unwrap();
    assert_eq!(imported.config.env, ["PATH=/bin", "A=1"]);
    assert_eq!(imported.names, ["docker.io/library/mine:latest"]);
    let root = at.store.rootfs(&imported.digest);
    assert!(root.join("a").exists() && root.join("b").exists());
    let mut twice = image.config.clone();
    twice["rootfs"]["diff_ids"][1] = twice["rootfs"]["diff_ids"][0].clone();
    let linked = archive(manifest(&[]), twice.to_string().as_bytes(), true);
    at.store
        .import_stream(&linked[..], &named("linked"))
        .unwrap();
    // A layer with another digest than the configuration names.
    let error = at
        .store
        .import_stream(
            &archive(manifest(&[]), twice.to_string().as_bytes(), false)[..],
            &named("x"),
        )
        .unwrap_err();
    assert!(error.to_string().contains("instead of"), "{error}");
    let odd = json!([{"Config": "../../etc/passwd", "Layers": []}]);
    let options = ImportOptions {
        format: ImportFormat::DockerArchive,
        ..named("x")
    };
    assert!(
        at.store
            .import_stream(&archive(odd, &config, false)[..], &options)
            .is_err()
    );
    assert!(at.store.get("x").is_err());
    at.assert_clean();
}

#[test]
fn a_root_file_system_is_imported() {
    let at = TestStore::new();
    let plain = tar(&[
        ("etc/os-release", b"ID=x"),
        ("manifest.json", b"{\"mine\": 1}"),
    ]);
    let mut digests = Vec::new();
    for packed in [Packed::Plain, Packed::Gzip, Packed::Zstd] {
        let imported = at
            .store
            .import_stream(&pack(&plain, packed)[..], &named("root"))
            .unwrap();
        digests.push(imported.digest);
        assert!(
            at.store
                .rootfs(&imported.digest)
                .join("manifest.json")
                .exists()
        );
        assert_eq!(
            imported.platform,
            Some(box_image::Platform {
                variant: None,
                ..box_image::Platform::host()
            })
        );
    }
    digests.dedup();
    assert_eq!(digests.len(), 1, "the same content is the same image");
    for bad in [&b""[..], b"not an archive at all", &[0; 4096]] {
        assert_eq!(
            at.store
                .import_stream(bad, &named("bad"))
                .unwrap_err()
                .code(),
            Code::Validation
        );
    }
    let missing = at
        .store
        .import(Path::new("/nonexistent/box"), &named("bad"))
        .unwrap_err();
    assert!(!missing.to_string().contains("/nonexistent"), "{missing}");
    at.assert_clean();
}

#[test]
fn a_layout_with_false_metadata_is_refused() {
    let image = TestImage::small();
    let files = layout(&[(&image, "x")]);
    let at = TestStore::new();
    // Any blob with another content.
    for number in 1..files.len() - 1 {
        let mut files = files.clone();
        let last = files[number].1.len() - 1;
        files[number].1[last] ^= 1;
        let error = at
            .store
            .import_stream(&tar_of(&files)[..], &named("x"))
            .unwrap_err();
        assert_eq!(
            error.code(),
            Code::Validation,
            "{} {error}",
            files[number].0
        );
        files.remove(number);
        assert!(
            at.store
                .import_stream(&tar_of(&files)[..], &named("x"))
                .is_err()
        );
    }
    // A blob that is a link to a file of the host.
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in &files {
        write(folder.path(), name, content);
    }
    let blob = folder
        .path()
        .join("blobs/sha256")
        .join(Digest::of(&image.layers[0]).hex());
    fs::rename(&blob, folder.path().join("outside")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("outside"), &blob).unwrap();
    let error = at.store.import(folder.path(), &named("x")).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    at.assert_empty();
    at.assert_clean();
}

#[test]
fn an_export_is_reproducible_and_can_be_imported() {
    let mut builder = tar::Builder::new(Vec::new());
    let long = format!("{}file", "long-directory-name/".repeat(12));
    let header = |kind, mode, size| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(7);
        header.set_gid(8);
        header.set_mtime(1_000_000_000);
        header.set_size(size);
        header
    };
    let plain = |builder: &mut tar::Builder<Vec<u8>>, path: &str, kind, mode| {
        builder
            .append_data(&mut header(kind, mode, 0), path, &b""[..])
            .unwrap();
    };
    plain(&mut builder, "dir/", tar::EntryType::Directory, 0o1777);
    let records = [("SCHILY.xattr.user.note", &b"v"[..]), ("mtime", b"5.25")];
    builder.append_pax_extensions(records).unwrap();
    plain(&mut builder, "dir/su", tar::EntryType::Regular, 0o4755);
    plain(&mut builder, "pipe", tar::EntryType::Fifo, 0o600);
    builder
        .append_link(
            &mut header(tar::EntryType::Link, 0o644, 0),
            "dir/same",
            "dir/su",
        )
        .unwrap();
    builder
        .append_link(
            &mut header(tar::EntryType::Symlink, 0o777, 0),
            "link",
            &long,
        )
        .unwrap();
    builder
        .append_data(
            &mut header(tar::EntryType::Regular, 0o600, 3),
            &long,
            &b"abc"[..],
        )
        .unwrap();
    let layer = builder.into_inner().unwrap();
    let at = TestStore::new();
    let first = at.store.import_stream(&layer[..], &named("first")).unwrap();
    let options = ExportOptions {
        name: Some("first:1".parse::<Reference>().unwrap()),
        ..ExportOptions::default()
    };
    let export = |query: &str| {
        let mut archive = Vec::new();
        let digest = at.store.export(query, &mut archive, &options).unwrap();
        (digest, archive)
    };
    let (digest, archive) = export("first");
    assert_eq!(export("first"), (digest, archive.clone()));
    let again = at
        .store
        .import_stream(&archive[..], &named("again"))
        .unwrap();
    assert_eq!(again.digest, digest);
    assert_eq!(again.config, first.config);
    // The same files, and so the same export.
    assert_eq!(export("again"), (digest, archive));
    let found = |image: &Digest, path: &str| {
        let found = fs::symlink_metadata(at.store.rootfs(image).join(path)).unwrap();
        (
            found.mode(),
            found.uid(),
            found.gid(),
            found.nlink(),
            found.mtime(),
            found.mtime_nsec(),
            found.len(),
        )
    };
    for path in ["", "dir", "dir/su", "dir/same", "link", "pipe", &long] {
        assert_eq!(
            found(&first.digest, path),
            found(&again.digest, path),
            "{path}"
        );
    }
    assert_eq!(found(&again.digest, "dir/su").5, 250_000_000);
    assert_eq!(found(&again.digest, "dir/su").3, 2);
    let mut note = [0; 8];
    let path = at.store.rootfs(&again.digest).join("dir/su");
    assert_eq!(
        rustix::fs::lgetxattr(&path, "user.note", &mut note[..]).unwrap(),
        1
    );
    assert!(at.store.export("missing", Vec::new(), &options).is_err());
    at.store.remove("first", &Uses::new()).unwrap();
    at.assert_clean();
}
