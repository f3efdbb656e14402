//! The audit lines of commands in the log: which caller started them, and how they ended, with or
//! without a reader, a waiting client or a running server.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use box_test_wait::blocking::eventually;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{Server, mark, running};

/// A server that appends its log, as JSON, to a file in its directory.
fn logged(directory: tempfile::TempDir) -> (Server, Log) {
    let log = Log(directory.path().join("log"));
    let file = std::fs::File::options()
        .create(true)
        .append(true)
        .open(&log.0);
    let server = Server::with(directory, |command: &mut Command| {
        command.stderr(file.unwrap()).env("BOXD_LOG_FORMAT", "json");
        let roots = format!("[\"{}\"]", std::env::temp_dir().display());
        command.env("BOXD_POLICY_ALLOWED_HOST_MOUNT_ROOTS", roots);
    });
    (server, log)
}

/// Kills a server.
fn killed(mut server: Server) -> tempfile::TempDir {
    server.signal(Signal::KILL);
    server.child.wait().unwrap();
    std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap())
}

struct Log(PathBuf);

impl Log {
    /// The log lines about commands.
    fn command_lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.0).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines
            .filter(|line: &Value| line["target"] == "box_runtime::audit")
            .map(|line| line["fields"].clone())
            .collect()
    }

    /// The lines with this verb about this command.
    fn of(&self, word: &str, id: &str) -> Vec<Value> {
        let mut lines = self.command_lines();
        lines.retain(|line| line["message"] == word && line["command_id"] == id);
        lines
    }

    fn count(&self, word: &str) -> usize {
        let lines = self.command_lines();
        lines.iter().filter(|line| line["message"] == word).count()
    }

    /// Waits for the end of a command, which the server logs once.
    fn end_of(&self, id: &str) -> Value {
        eventually(&format!("the end of {id}"), || {
            !self.of("finished", id).is_empty()
        });
        let mut ends = self.of("finished", id);
        assert_eq!(ends.len(), 1, "{ends:?}");
        ends.remove(0)
    }
}

/// Whether a process of this machine has these words in its arguments.
fn runs(words: &str) -> bool {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let line = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline"));
    all.filter_map(|entry| line(entry).ok())
        .any(|line| String::from_utf8_lossy(&line).contains(words))
}

/// Asks a server to run a command and to end it without a waiting client. The answer is never read.
fn ask(server: &Server, name: &str, cmd: &str) -> UnixStream {
    let path = server.endpoints[0].strip_prefix("unix:").unwrap();
    let mut stream = UnixStream::connect(path).unwrap();
    let call = json!({"jsonrpc": "2.0", "id": 1, "method": "box.exec",
        "params": {"spec": {"box_id": name, "cmd": cmd}}});
    stream.write_all(format!("{call}\n").as_bytes()).unwrap();
    stream
}

#[test]
fn the_log_has_start_and_end_of_every_command_and_no_secret() {
    let (server, log) = logged(tempfile::tempdir().unwrap());
    server.ok(&[
        "run",
        "--name",
        "b",
        "--env",
        "KEY=s3cret-value",
        "echo s3cret-text",
    ]);
    let detached = server.ok(&["exec", "-d", "--id", "far", "b", "printf 12345; exit 7"]);
    assert_eq!(detached, "b/far\n");
    // The server observes the end without a reader.
    let end = log.end_of("far");
    assert_eq!(
        (&end["exit_code"], &end["stdout_bytes"], &end["adopted"]),
        (&json!(7), &json!(5), &Value::Null),
        "{end}"
    );
    assert_eq!(
        (&end["owner"], &end["box_id"]),
        (&json!("local"), &json!("b"))
    );
    assert_eq!((log.count("started"), log.count("finished")), (2, 2));
    assert_eq!(log.command_lines()[0]["caller"], "local");

    // A command that did not start is logged as such, and an existing command is not started again.
    assert!(
        !server
            .run(&["exec", "-d", "--id", "no", "b", "--", "no-such"])
            .status
            .success()
    );
    server.ok(&["exec", "-d", "--id", "far", "b", "printf 12345; exit 7"]);
    assert_eq!(log.of("not started", "no")[0]["code"], "validation");
    assert_eq!(log.of("already exists", "far").len(), 1);

    // An exec without a waiting client is logged with its end, too.
    let sleeps = mark();
    let mut request = ask(&server, "b", &format!("exec sleep {sleeps}"));
    eventually("it runs", || running(&sleeps) == 1);
    let cancel = json!({"jsonrpc": "2.0", "method": "$/cancel", "params": {"id": 1}});
    writeln!(request, "{cancel}").unwrap();
    let ended = || {
        let lines = log.command_lines();
        lines.into_iter().find(|line| line["role"] == "Exec")
    };
    eventually("its end is logged", || ended().is_some());
    assert_eq!(ended().unwrap()["why"], "Killed");

    // A command that ends with its box is counted.
    server.ok(&["exec", "-d", "--id", "last", "b", "sleep 1000"]);
    server.ok(&["rm", "--force", "b"]);
    eventually("it ends with its box", || {
        let lines = log.command_lines();
        let with = |line: &&Value| line["message"] == "exit not observed";
        lines
            .iter()
            .find(with)
            .is_some_and(|line| line["commands"] == 1)
    });
    let text = std::fs::read_to_string(&log.0).unwrap();
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn commands_that_end_while_no_server_runs_are_logged_once_by_the_next() {
    let workspace = tempfile::tempdir().unwrap();
    let (server, log) = logged(tempfile::tempdir().unwrap());
    let path = workspace.path().to_str().unwrap();
    server.ok(&["run", "--name", "b", "--workspace", path, "true"]);
    let until = |file: &str| format!("while [ ! -e /workspace/{file} ]; do sleep 0.05; done");
    let (early_file, late_file) = (format!("early-{}", mark()), "late");
    let (early, late) = (until(&early_file), until(late_file));
    let early = format!("{early}; printf 123; exit 3");
    server.ok(&["exec", "-d", "--id", "early", "b", &early]);
    server.ok(&["exec", "-d", "--id", "late", "b", &late]);
    // This command ends because its server is killed.
    let sleeps = mark();
    let _asked = ask(&server, "e", &format!("exec sleep {sleeps}"));
    eventually("it runs", || running(&sleeps) == 1);

    let directory = killed(server);
    std::fs::write(workspace.path().join(&early_file), "").unwrap();
    eventually("they have ended", || {
        !runs(&early_file) && running(&sleeps) == 0
    });
    assert_eq!(log.count("finished"), 1, "no server ran that could log it");

    let (server, log) = logged(directory);
    let end = log.end_of("early");
    let reported = (&end["exit_code"], &end["stdout_bytes"], &end["adopted"]);
    assert_eq!(reported, (&json!(3), &json!(3), &json!(true)), "{end}");
    assert!(end["ended_at"].as_u64().unwrap() > 0);
    eventually("the end of the exec is logged", || {
        let mut lines = log.command_lines().into_iter();
        lines.any(|line| line["role"] == "Exec" && line["box_id"] == "e")
    });
    // The next server logs the end of a command that outlived its server.
    std::fs::write(workspace.path().join(late_file), "").unwrap();
    assert_eq!(log.end_of("late")["adopted"], Value::Null);

    // A logged end is not logged again: the next end of the box comes after all remaining ends.
    let (server, log) = logged(killed(server));
    server.ok(&["exec", "-d", "--id", "next", "b", "true"]);
    log.end_of("next");
    log.end_of("early");
    log.end_of("late");
}

#[test]
fn commands_of_a_box_from_a_pool_are_logged_under_the_id_of_its_request() {
    let (server, log) = logged(tempfile::tempdir().unwrap());
    let template = ["template", "create", "t", "--prepare", "true"];
    server.ok(&template);
    server.ok(&["pool", "create", "p", "--template", "t", "--size", "1"]);
    eventually("the pool is full", || {
        server.json(&["pool", "inspect", "p"])["content"]["pool"]["ready"] == 1
    });
    server.ok(&["run", "-d", "--name", "b", "--pool", "p", "true"]);
    assert_eq!(server.json(&["inspect", "b"])["box"]["pool"], "p");
    let taken = || {
        let mut lines = log.command_lines();
        lines.retain(|line| line["message"] == "taken from a pool");
        lines
    };
    let [taken] = &taken()[..] else {
        panic!("{:?}", log.command_lines());
    };
    assert_eq!(taken["box_id"], "b");
    let waited_as = taken["waited_as"].as_str().unwrap();
    assert!(waited_as.starts_with("pool-"), "{waited_as}");
    let ended = || {
        let mut lines = log.command_lines();
        lines.retain(|line| line["message"] == "finished" && line["box_id"] == "b");
        lines
    };
    eventually("the end of the command", || ended().len() == 1);
    let prepared = log.of("finished", "prepare-1");
    assert!(prepared.iter().any(|line| line["box_id"] == waited_as));
}
