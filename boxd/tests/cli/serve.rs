//! `serve` and `stdio`: authentication, state and shutdown.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use box_test_wait::LONG;
use box_test_wait::blocking::eventually;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{Server, boxd, err, feed, mark, out, running};

/// The token of a caller.
const ANN: &str = "ann-0123456789abcdef0123456789abcdef";

const TOKENS: &str =
    "ann ann-0123456789abcdef0123456789abcdef\nbob bob-0123456789abcdef0123456789abcdef\n";

fn with_tokens(more: impl FnOnce(&mut Command)) -> Server {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens");
    std::fs::write(&file, TOKENS).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let state = directory.path().join("state/boxd.sock");
    Server::with(directory, |command| {
        command.args([
            "--listen",
            &format!("unix:{}", state.display()),
            "--listen",
            "tcp://127.0.0.1:0",
        ]);
        command.arg("--token-file").arg(file);
        more(command);
    })
}

#[test]
fn the_default_socket_is_private_to_its_user() {
    let server = Server::start();
    let socket = server.directory.path().join("state/boxd.sock");
    assert_eq!(server.endpoints, [format!("unix:{}", socket.display())]);
    assert_eq!(
        std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let state = std::fs::metadata(socket.parent().unwrap()).unwrap();
    assert_eq!(state.permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_server_that_cannot_listen_keeps_adopted_boxes() {
    let mut server = Server::start();
    server.ok(&["run", "--name", "kept", "echo kept > /tmp/note"]);
    server.ok(&["exec", "--detach", "--id", "job", "kept", "sleep 1000"]);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let state = server.directory.path().join("state");
    // Beyond loopback the server requires tokens, and none are configured.
    let refused = boxd()
        .args(["serve", "--listen", "tcp://0.0.0.0:0", "--state-dir"])
        .arg(&state)
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    assert!(err(&refused).contains("not a loopback address"));
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let next = Server::with(directory, |_| {});
    assert_eq!(next.ok(&["exec", "kept", "cat /tmp/note"]), "kept\n");
    assert!(next.ok(&["ps", "kept"]).contains("running"));
}

#[test]
fn a_refused_listener_leaves_the_state_directory_empty() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    for (listen, why) in [
        (
            "tcp://0.0.0.0:1",
            "endpoint tcp://0.0.0.0:1: not a loopback",
        ),
        ("nope://x", "endpoint nope://x: unknown scheme; use "),
    ] {
        let mut serve = boxd();
        serve.args(["serve", "--listen", listen, "--state-dir"]);
        let refused = feed(serve.arg(&state), b"");
        assert_eq!(refused.status.code(), Some(125), "{refused:?}");
        assert!(err(&refused).contains(why), "{refused:?}");
        let files: Vec<_> = std::fs::read_dir(&state).unwrap().collect();
        assert!(files.is_empty(), "{files:?}");
    }
}

#[test]
fn a_second_signal_ends_the_wait() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = Server::with(directory, |command| {
        command.env("BOXD_SERVER_DRAIN_SEC", "600");
    });
    server.ok(&["run", "--name", "slow", "true"]);
    let endpoint = server.endpoints[0].clone();
    let mut waiting = boxd()
        .env("BOXD_ENDPOINT", &endpoint)
        .args(["exec", "slow", "echo begun; sleep 1000"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut started = [0; 6];
    waiting
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut started)
        .unwrap();
    let server_pid = rustix::process::Pid::from_child(&server.child);
    rustix::process::kill_process(server_pid, Signal::TERM).unwrap();
    eventually("it accepts no connection any more", || {
        !boxd()
            .env("BOXD_ENDPOINT", &endpoint)
            .arg("ps")
            .output()
            .unwrap()
            .status
            .success()
    });
    assert!(server.child.try_wait().unwrap().is_none(), "it drains");
    rustix::process::kill_process(server_pid, Signal::TERM).unwrap();
    assert_eq!(server.child.wait().unwrap().code(), Some(128 + 15));
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    // The next server takes over the remaining box and ends it.
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let next = Server::with(directory, |_| {});
    assert_eq!(next.ok(&["ps", "-q"]), "slow\n");
}

#[test]
fn a_token_authenticates_and_owns_its_boxes() {
    let server = with_tokens(|_| {});
    let tcp = server.endpoints[1].clone();
    let as_caller = |token: &str, arguments: &[&str]| {
        feed(
            boxd()
                .env("BOXD_ENDPOINT", &tcp)
                .env("BOXD_TOKEN", token)
                .args(arguments),
            b"",
        )
    };
    let (ann, bob) = (
        "ann-0123456789abcdef0123456789abcdef",
        "bob-0123456789abcdef0123456789abcdef",
    );
    assert!(
        as_caller(ann, &["run", "--name", "hers", "true"])
            .status
            .success()
    );
    assert_eq!(out(&as_caller(ann, &["ps", "-q"])), "hers\n");
    assert_eq!(out(&as_caller(bob, &["ps", "-q"])), "");
    assert!(err(&as_caller(bob, &["exec", "hers", "true"])).contains("not_found"));
    assert_eq!(
        server.ok(&["ps", "-q"]),
        "hers@ann\n",
        "the Unix socket sees all"
    );
    for wrong in ["", "x", &ann[1..], "local"] {
        let refused = as_caller(wrong, &["ps"]);
        assert_eq!(refused.status.code(), Some(125), "{refused:?}");
        assert!(!err(&refused).contains(ann));
    }
    let none = feed(boxd().env("BOXD_ENDPOINT", &tcp).arg("ps"), b"");
    assert_eq!(none.status.code(), Some(125), "{none:?}");
}

#[test]
fn a_token_has_separate_limits() {
    let server = with_tokens(|command| {
        command.env("BOXD_RUNTIME_MAX_BOXES_PER_TOKEN", "1");
    });
    let tcp = server.endpoints[1].clone();
    let as_caller = |token: &str, name: &str| {
        let mut command = boxd();
        command.env("BOXD_ENDPOINT", &tcp).env("BOXD_TOKEN", token);
        feed(command.args(["run", "--name", name, "true"]), b"")
    };
    let (ann, bob) = (
        "ann-0123456789abcdef0123456789abcdef",
        "bob-0123456789abcdef0123456789abcdef",
    );
    assert!(as_caller(ann, "a").status.success());
    let second = as_caller(ann, "b");
    assert!(err(&second).contains("capacity"), "{second:?}");
    assert!(
        as_caller(bob, "c").status.success(),
        "another token has room"
    );
    for name in ["d", "e"] {
        server.ok(&["run", "--name", name, "true"]);
    }
}

#[test]
fn remote_clients_need_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = boxd();
    command
        .args(["serve", "--listen", "tcp://0.0.0.0:0", "--state-dir"])
        .arg(dir.path());
    let refused = feed(&mut command, b"");
    assert_eq!(refused.status.code(), Some(125));
    assert!(err(&refused).contains("token_file"), "{refused:?}");
}

#[test]
fn http_on_the_rpc_port_is_closed() {
    let server = with_tokens(|_| {});
    let address = server.endpoints[1].strip_prefix("tcp://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert_eq!(String::from_utf8_lossy(&answer), "");
}

#[test]
fn boxes_outlive_a_server_that_is_killed() {
    let mut server = Server::start();
    server.ok(&["run", "--name", "b", "echo kept > /tmp/f"]);
    let name = server.ok(&[
        "exec",
        "--detach",
        "b",
        "while [ ! -e /tmp/go ]; do sleep 0.1; done; echo done",
    ]);
    server.signal(Signal::KILL);
    server.child.wait().unwrap();
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let server = Server::with(directory, |_| {});
    assert_eq!(
        server.ok(&["exec", "b", "cat /tmp/f; touch /tmp/go"]),
        "kept\n"
    );
    assert_eq!(server.run(&["wait", name.trim()]).status.code(), Some(0));
    assert_eq!(server.ok(&["logs", name.trim()]), "done\n");
}

#[test]
fn a_signed_url_outlives_the_server() {
    let http = |command: &mut Command| {
        command.args(["--http", "127.0.0.1:0"]);
    };
    let mut server = Server::with(tempfile::tempdir().unwrap(), http);
    server.ok(&["run", "--name", "web", "echo found > /tmp/index.html"]);
    server.ok(&[
        "exec",
        "-d",
        "web",
        "exec python3 -m http.server -d /tmp 8000",
    ]);
    let address = server.ok(&["port", "web", "8000"]);
    let path = address
        .trim()
        .strip_prefix(&server.endpoints[1])
        .unwrap()
        .to_owned();
    let request = |server: &Server| {
        let host = server.endpoints[1].strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    eventually("it listens", || request(&server).ends_with("found\n"));
    server.signal(Signal::KILL);
    server.child.wait().unwrap();
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let server = Server::with(directory, http);
    let answer = request(&server);
    assert!(answer.ends_with("found\n"), "{answer}");
    // Another server's key does not verify it.
    let other = Server::with(tempfile::tempdir().unwrap(), http);
    other.ok(&["run", "--name", "web", "true"]);
    assert!(!request(&other).ends_with("found\n"));
    let none = Server::start();
    none.ok(&["run", "--name", "web", "true"]);
    let refused = none.run(&["port", "web", "8000"]);
    assert!(err(&refused).contains("--http"), "{refused:?}");
}

#[test]
fn a_service_manager_is_notified_of_start_and_stop() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(LONG)).unwrap();
    let heard = || {
        let mut buffer = [0; 64];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let server = Server::with(directory, |command| {
        command.env("NOTIFY_SOCKET", &path);
    });
    assert_eq!(heard(), "READY=1");
    server.ok(&["ps"]);
    server.signal(Signal::TERM);
    assert_eq!(heard(), "STOPPING=1");
}

#[test]
fn a_stopped_server_deletes_its_boxes() {
    let mut server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let sleeps = mark();
    let script = format!("exec sleep {sleeps}");
    let mut callers: Vec<_> = (0..50)
        .map(|_| {
            server
                .boxd(&["exec", "b", &script])
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    eventually("all run", || running(&sleeps) == 50);
    server.signal(Signal::TERM);
    assert!(server.child.wait().unwrap().success());
    for caller in &mut callers {
        assert!(
            !caller.wait().unwrap().success(),
            "no client sees a success"
        );
    }
    assert_eq!(running(&sleeps), 0);
    assert!(!server.directory.path().join("state/boxd.sock").exists());
}

#[test]
fn keep_boxes_leaves_boxes_to_the_next_server() {
    let keep = |command: &mut Command| {
        command.env("BOXD_SERVER_KEEP_BOXES", "true");
    };
    let mut server = Server::with(tempfile::tempdir().unwrap(), keep);
    server.ok(&["run", "--name", "b", "true"]);
    server.signal(Signal::TERM);
    assert!(server.child.wait().unwrap().success());
    let directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
    let server = Server::with(directory, |_| {});
    assert_eq!(server.ok(&["ps", "-q"]), "b\n");
}

#[test]
fn sighup_reloads_the_policy() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("boxd.toml");
    let log = directory.path().join("log");
    std::fs::write(&file, "[policy]\nenabled = true\n").unwrap();
    let server = Server::with(directory, |command| {
        command.arg("--config").arg(&file);
        command.stderr(std::fs::File::create(&log).unwrap());
    });
    server.ok(&["run", "true"]);
    std::fs::write(&file, "[policy]\nenabled = false\n").unwrap();
    server.signal(Signal::HUP);
    eventually("boxes are unavailable", || {
        err(&server.run(&["run", "true"]))
            .contains("policy.enabled: boxes are disabled; set it to true")
    });
    std::fs::write(&file, "[policy]\nenabled = maybe\n").unwrap();
    server.signal(Signal::HUP);
    eventually("it has read the file", || {
        std::fs::read_to_string(&log)
            .unwrap()
            .contains("policy not reloaded")
    });
    assert!(
        err(&server.run(&["run", "true"]))
            .contains("policy.enabled: boxes are disabled; set it to true"),
        "the old configuration applies"
    );
    std::fs::write(&file, "[policy]\nenabled = true\n").unwrap();
    server.signal(Signal::HUP);
    eventually("boxes are available again", || {
        server.run(&["run", "true"]).status.success()
    });
}

#[test]
fn boxes_of_a_stdio_server_end_with_the_connection() {
    let sleeps = mark();
    let mut child = boxd()
        .arg("stdio")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let call = json!({"jsonrpc": "2.0", "id": 1, "method": "box.exec", "params": {"spec": {"box_id": "s", "cmd": "echo over pipes"}}});
    writeln!(stdin, "{call}").unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let answer: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(
        (&answer["id"], &answer["result"]["stdout"]),
        (&json!(1), &json!("over pipes\n")),
        "{answer}"
    );
    let call = json!({"jsonrpc": "2.0", "id": 2, "method": "command.start", "params": {"box_id": "s",
        "program": {"argv": ["sleep", sleeps]}, "on_disconnect": "keep"}});
    writeln!(stdin, "{call}").unwrap();
    lines.next().unwrap().unwrap();
    assert_eq!(running(&sleeps), 1, "control");
    drop(stdin);
    assert!(child.wait().unwrap().success());
    assert_eq!(running(&sleeps), 0);
}

#[test]
fn an_unwritable_log_does_not_stop_the_server() {
    // As after `boxd serve 2>&1 | tee log` and Ctrl-C: the reader of the log is gone. Or its disk
    // is full.
    let full = std::fs::File::options().write(true).open("/dev/full");
    for log in [Stdio::piped(), full.unwrap().into()] {
        let directory = tempfile::tempdir().unwrap();
        let mut server = Server::with(directory, |command| {
            command.stderr(log).env("BOXD_LOG_LEVEL", "debug");
        });
        drop(server.child.stderr.take());
        assert_eq!(server.ok(&["run", "--name", "b", "echo ran"]), "ran\n");
        server.signal(Signal::INT);
        let ended = server.child.wait().unwrap();
        assert_eq!(ended.code(), Some(0), "{ended:?}");
        let state = server.directory.path().join("state");
        let left = std::fs::read_dir(state).unwrap().flatten();
        let is_box = |entry: &std::fs::DirEntry| entry.path().join("logs").exists();
        let boxes: Vec<_> = left.filter(is_box).collect();
        assert!(boxes.is_empty(), "its boxes ended with it: {boxes:?}");
    }
}

#[test]
fn a_second_server_of_a_state_directory_is_refused() {
    let server = Server::start();
    let state = server.directory.path().join("state");
    let start = |state: &std::path::Path| {
        let mut command = boxd();
        command.args(["serve", "--state-dir"]).arg(state);
        err(&command.output().unwrap())
    };
    let reported = start(&state);
    assert!(
        reported.contains("another server uses it") && reported.contains("--state-dir"),
        "{reported}"
    );
    let odd = tempfile::tempdir().unwrap();
    std::fs::create_dir(odd.path().join("lock")).unwrap();
    let reported = start(odd.path());
    assert!(
        reported.contains("is a directory") && !reported.contains("another server"),
        "{reported}"
    );
}

#[test]
fn a_reload_creates_default_workspaces() {
    let directory = tempfile::tempdir().unwrap();
    let (file, log) = (
        directory.path().join("boxd.toml"),
        directory.path().join("log"),
    );
    let root = directory.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let (hers, everybodys) = (root.join("ann/box"), root.join("all"));
    std::fs::write(&file, "[policy]\n").unwrap();
    let server = Server::with(directory, |command| {
        command
            .env("BOXD_TOKENS", format!("ann {ANN}\n"))
            .args(["--listen", "tcp://127.0.0.1:0", "--config"])
            .arg(&file)
            .stderr(std::fs::File::create(&log).unwrap());
    });
    let policy = |workspace: &std::path::Path| {
        let text = format!(
            "[policy]\nallowed_host_mount_roots = [{root:?}]\ndefault_host_workspace = {everybodys:?}\n\
             [policy.tokens.ann]\nallowed_host_mount_roots = [{root:?}]\ndefault_host_workspace = {workspace:?}\n"
        );
        std::fs::write(&file, text).unwrap();
        server.signal(Signal::HUP);
    };
    policy(&hers);
    eventually("both directories exist", || {
        hers.is_dir() && everybodys.is_dir()
    });
    eventually("the policy applies", || {
        std::fs::read_to_string(&log)
            .unwrap()
            .contains("policy reloaded")
    });
    let run = |cmd: &str| {
        let mut command = server.boxd(&["run", cmd]);
        command
            .env("BOXD_TOKEN", ANN)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let wrote = run("echo hi > file");
    assert!(wrote.status.success(), "{wrote:?}");
    assert_eq!(std::fs::read_to_string(hers.join("file")).unwrap(), "hi\n");
    // A directory that cannot be made changes nothing.
    std::fs::write(root.join("taken"), "").unwrap();
    policy(&root.join("taken/box"));
    eventually("it has read the file", || {
        let log = std::fs::read_to_string(&log).unwrap();
        log.contains("policy not reloaded") && log.contains("default_host_workspace")
    });
    assert_eq!(out(&run("cat file")), "hi\n");
}
