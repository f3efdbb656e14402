//! Packages that a guest installs with pip and npm of the machine, from files in its workspace.

use super::support::{boxd, err, feed, out};

/// Makes a wheel with a program in it.
const WHEEL: &str = r#"
import zipfile
entries = {
    "demobox.py": "def main():\n    print('installed by pip')\n",
    "demobox-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demobox\nVersion: 1.0\n",
    "demobox-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "demobox-1.0.dist-info/entry_points.txt": "[console_scripts]\ndemobox = demobox:main\n",
}
record = "".join(f"{name},,\n" for name in entries) + "demobox-1.0.dist-info/RECORD,,\n"
with zipfile.ZipFile("demobox-1.0-py3-none-any.whl", "w") as wheel:
    for name, text in entries.items():
        wheel.writestr(name, text)
    wheel.writestr("demobox-1.0.dist-info/RECORD", record)
"#;

fn run(text: &str, more: &[&str]) -> std::process::Output {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("wheel.py"), WHEEL).unwrap();
    let mut command = boxd();
    command.args(["run", "--workspace"]).arg(directory.path());
    feed(command.args(more).arg(text), b"")
}

#[test]
fn pip_installs_packages_for_the_guest() {
    let install = "/usr/bin/python3 wheel.py && /usr/bin/pip3 install --no-index --quiet ./demobox-1.0-py3-none-any.whl";
    let ran = run(&format!("{install} && demobox && type -P demobox"), &[]);
    let expected = "installed by pip\n/home/box/.local/bin/demobox\n";
    assert_eq!(out(&ran), expected, "{ran:?}");
    // A login shell sets its own PATH.
    let ran = run(&format!("{install} && sh -lc demobox"), &[]);
    assert_eq!(out(&ran), "installed by pip\n", "{ran:?}");
    // A variable of the caller applies: here it restores Debian's rule.
    let refused = run(install, &["-e", "PIP_BREAK_SYSTEM_PACKAGES=0"]);
    let rule = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('stdlib') + '/EXTERNALLY-MANAGED'))";
    let has_rule = run(&format!("/usr/bin/python3 -c \"{rule}\""), &[]);
    if out(&has_rule) == "True\n" {
        assert!(!refused.status.success(), "{refused:?}");
        assert!(err(&refused).contains("externally-managed"), "{refused:?}");
    } else {
        assert!(refused.status.success(), "{refused:?}");
    }
}

/// Makes a wheel of 300 MB that does not compress.
const LARGE: &str = r#"
import os, zipfile
piece = os.urandom(1 << 20)
with zipfile.ZipFile("/tmp/large-1.0-py3-none-any.whl", "w") as wheel:
    with wheel.open("large/data.bin", "w", force_zip64=True) as data:
        for n in range(300):
            data.write(piece)
    wheel.writestr("large/__init__.py", "")
    wheel.writestr("large-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: large\nVersion: 1.0\n")
    wheel.writestr("large-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("large-1.0.dist-info/RECORD", "large/data.bin,,\nlarge/__init__.py,,\nlarge-1.0.dist-info/METADATA,,\nlarge-1.0.dist-info/WHEEL,,\nlarge-1.0.dist-info/RECORD,,\n")
"#;

#[test]
fn a_large_package_needs_a_disk() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("build.py"), LARGE).unwrap();
    let install = "/usr/bin/python3 build.py && /usr/bin/pip3 install --no-index --quiet /tmp/large-1.0-py3-none-any.whl \
        && /usr/bin/python3 -c 'import large, os; print(os.path.getsize(large.__path__[0] + \"/data.bin\"))'";
    let run = |options: &[&str]| {
        let mut command = boxd();
        command.args(["run", "--timeout", "10m", "--workspace"]);
        command.arg(directory.path()).args(options);
        feed(command.arg(install), b"")
    };
    let ran = run(&["--disk-mb", "2g"]);
    assert_eq!(out(&ran), format!("{}\n", 300 << 20), "{ran:?}");
    let refused = run(&[]);
    assert!(!refused.status.success(), "control: {refused:?}");
}

#[test]
fn npm_installs_packages_for_the_guest() {
    let package = r#"mkdir p && cd p && printf '#!/usr/bin/env node\nconsole.log("installed by npm")\n' > x.js &&
        echo '{"name":"demobox","version":"1.0.0","bin":{"demobox":"x.js"}}' > package.json &&
        npm pack --silent > /dev/null && npm install --silent --no-audit -g ./demobox-1.0.0.tgz"#;
    let ran = run(&format!("{package} && demobox && type -P demobox"), &[]);
    let expected = "installed by npm\n/home/box/.local/bin/demobox\n";
    assert_eq!(out(&ran), expected, "{ran:?}");
    let ran = run(
        "echo $NPM_CONFIG_PREFIX",
        &["-e", "NPM_CONFIG_PREFIX=/tmp/own"],
    );
    assert_eq!(out(&ran), "/tmp/own\n", "the caller's value wins");
}

#[test]
fn with_toolchains_mounts_toolchains_read_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let home = tempfile::tempdir().unwrap();
    let bin = home.path().join(".cargo/bin");
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::create_dir_all(home.path().join(".ssh")).unwrap();
    std::fs::write(bin.join("hometool"), "#!/bin/sh\necho from home\n").unwrap();
    std::fs::set_permissions(bin.join("hometool"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = home.path().to_str().unwrap();
    let text = format!(
        "hometool; touch {path}/.cargo/bin/x || echo kept; ls -A {path}; demo=$(type -P python3) && echo $demo"
    );
    let with = |options: &[&str]| {
        let mut command = boxd();
        feed(
            command
                .env("HOME", path)
                .arg("run")
                .args(options)
                .arg(&text),
            b"",
        )
    };
    let ran = with(&["--with-toolchains"]);
    let expected = "from home\nkept\n.cargo\n/usr/bin/python3\n";
    assert_eq!(out(&ran), expected, "{ran:?}");
    assert!(
        err(&with(&[])).contains("hometool: command not found"),
        "control"
    );
    std::os::unix::fs::symlink("/opt", home.path().join(".rustup")).unwrap();
    let refused = with(&["--with-toolchains"]);
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(
        err(&refused).contains("~/.rustup points outside the home"),
        "{refused:?}"
    );
}
