//! `cp`.

use std::os::unix::fs::PermissionsExt as _;

use super::support::{Server, err, feed};

fn with_box() -> Server {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    server
}

#[test]
fn files_are_copied_byte_for_byte() {
    let (server, dir) = (with_box(), tempfile::tempdir().unwrap());
    let data: Vec<u8> = (0..=250).cycle().take(5_000_000).collect();
    let here = dir.path().join("data");
    std::fs::write(&here, &data).unwrap();
    server.ok(&["cp", here.to_str().unwrap(), "b:/tmp/"]);
    let back = dir.path().join("back");
    server.ok(&["cp", "b:/tmp/data", back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == data);
    // Streams.
    assert!(
        feed(&mut server.boxd(&["cp", "-", "b:/tmp/in"]), &data)
            .status
            .success()
    );
    assert!(server.run(&["cp", "b:/tmp/in", "-"]).stdout == data);
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 2, "no partial copy is left behind: {names:?}");
}

fn mode(path: &std::path::Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_copy_keeps_the_executable_bit() {
    let (server, dir) = (with_box(), tempfile::tempdir().unwrap());
    let here = dir.path().join("x.sh");
    std::fs::write(&here, "#!/bin/sh\necho ran\n").unwrap();
    std::fs::set_permissions(&here, std::fs::Permissions::from_mode(0o4755)).unwrap();
    server.ok(&["cp", here.to_str().unwrap(), "b:/tmp/"]);
    assert_eq!(
        server.ok(&["exec", "b", "/tmp/x.sh; stat -c %a /tmp/x.sh"]),
        "ran\n755\n"
    );
    server.ok(&["exec", "b", "chmod 711 /tmp/x.sh"]);
    let back = dir.path().join("back");
    server.ok(&["cp", "b:/tmp/x.sh", back.to_str().unwrap()]);
    assert_eq!(mode(&back), 0o711);
}

#[test]
fn existing_files_pipes_and_devices_keep_their_type() {
    let (server, dir) = (with_box(), tempfile::tempdir().unwrap());
    server.ok(&["exec", "b", "echo new > /tmp/f"]);
    let at = |name: &str| dir.path().join(name);
    let copy = |name: &str| server.run(&["cp", "b:/tmp/f", at(name).to_str().unwrap()]);
    // A file keeps its mode and its owner.
    std::fs::write(at("file"), "old, and longer").unwrap();
    std::fs::set_permissions(at("file"), std::fs::Permissions::from_mode(0o640)).unwrap();
    let root = rustix::process::geteuid().is_root();
    if root {
        std::os::unix::fs::chown(at("file"), Some(12), Some(34)).unwrap();
    }
    std::os::unix::fs::symlink("file", at("link")).unwrap();
    assert!(err(&copy("link")).contains("symbolic link, which cp does not follow"));
    assert_eq!(
        std::fs::read_to_string(at("file")).unwrap(),
        "old, and longer"
    );
    assert!(at("link").is_symlink());
    assert!(copy("file").status.success());
    assert_eq!(std::fs::read_to_string(at("file")).unwrap(), "new\n");
    assert_eq!(mode(&at("file")), 0o640);
    if root {
        use std::os::unix::fs::MetadataExt as _;
        let meta = std::fs::metadata(at("file")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (12, 34));
    }
    // A pipe stays a pipe, and so does every device.
    let pipe = at("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let reading = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read_to_string(pipe).unwrap()
    });
    assert!(copy("pipe").status.success());
    assert_eq!(reading.join().unwrap(), "new\n");
    assert!(!std::fs::metadata(&pipe).unwrap().is_file());
    assert_eq!(server.ok(&["cp", "b:/tmp/f", "/dev/stdout"]), "new\n");
    // The client writes neither through a dangling link nor to a host file with the name of a
    // partial copy.
    std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
    assert!(err(&copy("dangling")).contains("symbolic link, which cp does not follow"));
    std::fs::write(at(".fresh.part"), "mine").unwrap();
    assert!(copy("fresh").status.success());
    assert_eq!(std::fs::read_to_string(at(".fresh.part")).unwrap(), "mine");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 6);
}

#[test]
fn directories_are_copied_both_ways() {
    let (server, dir) = (with_box(), tempfile::tempdir().unwrap());
    let tree = dir.path().join("tree");
    std::fs::create_dir_all(tree.join("a/b")).unwrap();
    std::fs::write(tree.join("a/b/f"), "deep").unwrap();
    std::fs::write(tree.join("run.sh"), "#!/bin/sh\necho ran\n").unwrap();
    std::fs::set_permissions(tree.join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("a/b/f", tree.join("link")).unwrap();
    server.ok(&["cp", tree.to_str().unwrap(), "b:/tmp/"]);
    assert_eq!(
        server.ok(&["exec", "b", "cat /tmp/tree/link; /tmp/tree/run.sh"]),
        "deepran\n"
    );
    let back = dir.path().join("back");
    server.ok(&["cp", "b:/tmp/tree", back.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(back.join("a/b/f")).unwrap(), "deep");
    assert_eq!(
        std::fs::read_link(back.join("link")).unwrap().to_str(),
        Some("a/b/f")
    );
    assert_eq!(
        std::fs::metadata(back.join("run.sh"))
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o755
    );
}

#[test]
fn a_tree_that_does_not_fit_is_refused_with_the_reason() {
    let (server, dir) = (Server::start(), tempfile::tempdir().unwrap());
    server.ok(&["run", "--name", "b", "--memory-mb", "64", "true"]);
    for name in ["a", "b", "c"] {
        std::fs::write(dir.path().join(name), vec![7; 40 << 20]).unwrap();
    }
    let refused = server.run(&["cp", dir.path().to_str().unwrap(), "b:/tmp/tree"]);
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    let stderr_text = err(&refused);
    assert!(
        !stderr_text.is_empty() && !stderr_text.contains("broken pipe"),
        "{stderr_text}"
    );
}

#[test]
fn a_symbolic_link_of_a_guest_is_not_followed() {
    let (server, dir) = (with_box(), tempfile::tempdir().unwrap());
    let outside = dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let back = dir.path().join("back");
    let copy = || server.run(&["cp", "b:/tmp/t", back.to_str().unwrap()]);
    let link = format!("mkdir -p /tmp/t && ln -s {} /tmp/t/d", outside.display());
    server.ok(&["exec", "b", &link]);
    assert!(copy().status.success());
    // The copy has a directory with a file instead of the link, and the link on the host remains.
    server.ok(&[
        "exec",
        "b",
        "rm /tmp/t/d && mkdir /tmp/t/d && echo x > /tmp/t/d/f",
    ]);
    std::fs::rename(&back, dir.path().join("t")).unwrap();
    let again = server.run(&["cp", "b:/tmp/t", dir.path().to_str().unwrap()]);
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "{again:?}");
}

#[test]
fn a_failed_copy_names_the_reason() {
    let server = with_box();
    for (from, to, why) in [
        ("b:/nope", "x", "not_found"),
        ("/nope/at/all", "b:/tmp/x", "/nope/at/all"),
        ("a", "c", "BOX:/PATH"),
        ("b:/tmp", "b:/x", "first"),
        ("/etc/hostname", "b:/usr/x", "denied"),
    ] {
        let refused = server.run(&["cp", from, to]);
        assert_eq!(refused.status.code(), Some(125), "{from} {to}");
        assert!(
            err(&refused).contains(why),
            "{from} {to}: {}",
            err(&refused)
        );
    }
}

#[test]
fn a_file_that_does_not_fit_is_refused_and_the_box_survives() {
    let server = Server::start();
    server.ok(&["run", "--name", "small", "--memory-mb", "64", "true"]);
    let path = tempfile::tempdir().unwrap();
    let large = path.path().join("large");
    std::fs::write(&large, vec![b'x'; 52 << 20]).unwrap();
    let refused = server.run(&["cp", large.to_str().unwrap(), "small:/tmp/large"]);
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(err(&refused).contains("capacity"), "{refused:?}");
    assert_eq!(server.ok(&["exec", "small", "ls -A /tmp"]), "");
}
