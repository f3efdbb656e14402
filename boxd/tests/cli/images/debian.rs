//! A Debian image with Python: pulled, run, snapshotted and forked a hundred times.
//!
//! `cargo xtask test` installs `mmdebstrap` and `umoci`. The image is made once for each target
//! directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use box_test_wait::blocking::eventually;

use super::machine::{Machine, on_each_machine};
use super::registry::Registry;
use crate::snapshots::assert_nothing_left_in;

const FORKS: usize = 100;
/// Clients that look at forks at the same time.
const CLIENTS: usize = 4;

/// Changes files everywhere: many new ones, one deleted and one replaced file of the image.
const CHANGE: &str = r"
import os, sys
for number in range(300):
    folder = os.path.expanduser(f'~/tree/{number % 10}')
    os.makedirs(folder, exist_ok=True)
    with open(f'{folder}/{number}', 'w') as file:
        file.write(f'{number}\n' * number)
os.symlink('0/0', os.path.expanduser('~/tree/link'))
os.remove('/etc/debian_version')
with open('/etc/issue', 'w') as file:
    file.write('changed')
with open('/opt/added', 'w') as file:
    file.write('added')
print(sys.version_info.major, os.path.exists('/var/lib/dpkg/status'))
";

/// Prints a digest of every changed file, and with a name makes changes of its own.
const LOOK: &str = r"
import hashlib, os, sys
digest, count = hashlib.sha256(), 0
places = [os.path.expanduser('~/tree'), '/opt']
files = [os.path.join(folder, name) for place in places for folder, _, names in os.walk(place) for name in names]
for path in sorted(files + ['/etc/issue']):
    with open(path, 'rb') as file:
        digest.update(path.encode() + file.read())
    count += 1
print(count, os.path.exists('/etc/debian_version'), os.path.exists('/opt/own'), digest.hexdigest())
for name in sys.argv[1:]:
    with open('/opt/own', 'w') as file:
        file.write(name)
    os.remove(os.path.expanduser('~/tree/3/3'))
";

/// Returns the OCI layout of the image, and makes it if it does not exist.
fn layout() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let made = target.join("debian-python");
    // Other tests, and other processes, wait until the image is complete.
    let lock = File::create(target.join("debian-python.lock")).unwrap();
    lock.lock().unwrap();
    if made.exists() {
        return made;
    }
    let folder = tempfile::tempdir_in(target).unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let archive = at("root.tar");
    let options = ["--quiet", "--variant=minbase", "--include=python3"];
    let mut debian = Command::new("mmdebstrap");
    succeed(debian.args(options).args(["bookworm", &archive]));
    let (image, bundle) = (format!("{}:v1", at("layout")), at("bundle"));
    let umoci = |arguments: &[&str]| succeed(Command::new("umoci").args(arguments));
    umoci(&["init", "--layout", &at("layout")]);
    umoci(&["new", "--image", &image]);
    let unpack = ["unpack", "--image", &image, &bundle];
    // An ordinary user owns every file.
    let rootless = (!rustix::process::geteuid().is_root()).then_some("--rootless");
    umoci(&[&unpack[..1], rootless.as_slice(), &unpack[1..]].concat());
    let root = Path::new(&bundle).join("rootfs");
    succeed(
        Command::new("tar")
            .arg("-xpf")
            .arg(&archive)
            .arg("-C")
            .arg(root),
    );
    umoci(&["repack", "--image", &image, &bundle]);
    fs::rename(at("layout"), &made).unwrap();
    made
}

#[track_caller]
fn succeed(command: &mut Command) {
    let ran = command.output();
    let ran = ran.unwrap_or_else(|error| panic!("{command:?}: {error}; install it"));
    assert!(ran.status.success(), "{command:?}: {ran:?}");
}

/// The cgroups with this name, in every hierarchy.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let top = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(top).into_iter().flatten().flatten();
    let tops = hierarchies
        .map(|entry| entry.path())
        .chain([top.to_owned()]);
    tops.map(|top| top.join(name))
        .filter(|path| path.exists())
        .collect()
}

/// Runs a client for each name, several at once.
fn for_each(names: &[&str], look: impl Fn(&str) + Sync) {
    std::thread::scope(|scope| {
        for part in names.chunks(names.len().div_ceil(CLIENTS)) {
            scope.spawn(|| part.iter().for_each(|name| look(name)));
        }
    });
}

#[test]
fn a_debian_image_is_pulled_run_snapshotted_and_forked_a_hundred_times() {
    let registry = Registry::start();
    registry.push(&layout(), "debian:12");
    let image = registry.reference("debian:12");
    on_each_machine(|machine| {
        machine.trust(&registry);
        let host = image.split_once('/').unwrap().0;
        let group = format!("box-debian-{}-{}", std::process::id(), machine.name.len());
        let mut serve = machine.boxd(&["serve"]);
        serve.env("BOXD_RUNTIME_CGROUP_PARENT", &group);
        let boxes = (FORKS + 10).to_string();
        let server = Machine::start(serve.env("BOXD_RUNTIME_MAX_BOXES", boxes));
        assert!(machine.login(host, "secret").status.success());
        machine.ok(&["image", "pull", &image]);
        let run = ["run", "--name", "b", "--image", &image, "--"];
        let changed = machine.ok(&[&run[..], &["python3", "-c", CHANGE]].concat());
        assert_eq!(changed, "3 True\n");
        let look = |name: &str, own: &[&str]| {
            machine.ok(&[&["exec", name, "--", "python3", "-c", LOOK], own].concat())
        };
        let files = look("b", &[]);
        assert!(files.starts_with("303 False False "), "{files}");
        machine.ok(&["stop", "b"]);
        machine.ok(&["snapshot", "b", "s"]);

        let listed = machine.ok(&["fork", "b", "-n", &FORKS.to_string(), "--prefix", "f"]);
        let forks: Vec<&str> = listed.lines().collect();
        assert_eq!(forks.len(), FORKS, "{listed}");
        // Each has every file, and none that another one writes.
        for_each(&forks, |name| {
            assert_eq!(look(name, &[name]), files, "{name}");
        });
        for_each(&forks, |name| {
            let text = "cat /opt/own; ls ~/tree/3 | wc -l; ls ~/tree/4 | wc -l";
            let own = machine.ok(&["exec", name, text]);
            assert_eq!(own, format!("{name}29\n30\n"));
        });
        for_each(&forks, |name| drop(machine.ok(&["rm", "--force", name])));
        // The snapshot and the box are as before.
        let run = ["run", "--snapshot", "s", "--", "python3", "-c", LOOK];
        assert_eq!(machine.ok(&run), files);
        machine.ok(&["start", "b"]);
        assert_eq!(look("b", &[]), files);

        machine.ok(&["rm", "--force", "b"]);
        machine.ok(&["snapshot", "rm", "s"]);
        machine.ok(&["image", "rm", &image]);
        assert_nothing_left_in(&machine.state());
        machine.assert_clean();
        assert_eq!(machine.stored("images"), [""; 0]);
        drop(server);
        eventually("no cgroup is left", || cgroups(&group).is_empty());
    });
}
