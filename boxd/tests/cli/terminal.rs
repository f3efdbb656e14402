//! The program on a terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use box_test_wait::blocking::eventually;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::support::{Server, boxd, mark, running};

/// A terminal and the program on it.
struct Terminal {
    child: Child,
    keys: File,
    screen: Arc<Mutex<Vec<u8>>>,
    controller: OwnedFd,
}

impl Terminal {
    fn new(command: &mut Command, columns: u16) -> Self {
        let controller =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        resize(&controller, columns, 30);
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .open(name.to_str().unwrap())
                .unwrap()
        };
        let child = command
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .env("TERM", "xterm")
            .spawn()
            .unwrap();
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, shown) = (
            File::from(controller.try_clone().unwrap()),
            Arc::clone(&screen),
        );
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The read fails when the other end is closed.
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                shown.lock().unwrap().extend(&buffer[..length]);
            }
        });
        Self {
            child,
            keys: File::from(controller.try_clone().unwrap()),
            screen,
            controller,
        }
    }

    fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn shows(&self, text: &str) {
        eventually(&format!("{text:?} is shown"), || {
            String::from_utf8_lossy(&self.screen.lock().unwrap()).contains(text)
        });
    }
}

fn resize(terminal: &OwnedFd, columns: u16, rows: u16) {
    tcsetwinsize(
        terminal,
        Winsize {
            ws_col: columns,
            ws_row: rows,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    )
    .unwrap();
}

#[test]
fn a_shell_gets_a_terminal_with_size_keys_and_exit_code() {
    let server = Server::start();
    let mut terminal = Terminal::new(&mut server.boxd(&["shell", "b"]), 100);
    terminal.types("stty size; echo on $(tty)\n");
    terminal.shows("30 100");
    terminal.shows("on /dev/pts/");
    resize(&terminal.controller, 77, 22);
    let pid = rustix::process::Pid::from_child(&terminal.child);
    // The kernel signals only the leader of a name, which this child is not.
    rustix::process::kill_process(pid, rustix::process::Signal::WINCH).unwrap();
    eventually("the new size arrives", || {
        terminal.types("stty size\n");
        std::thread::sleep(std::time::Duration::from_millis(100));
        String::from_utf8_lossy(&terminal.screen.lock().unwrap()).contains("22 77")
    });
    let sleeps = mark();
    terminal.types(&format!("sleep {sleeps}\n"));
    // An interrupt key also discards unread input.
    eventually("it sleeps", || running(&sleeps) == 1);
    terminal.types("\x03");
    terminal.types("echo still $((40 + 2)); exit 7\n");
    terminal.shows("still 42");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(7));
}

#[test]
fn a_shell_without_a_server_gets_a_new_box() {
    let empty_dir = tempfile::tempdir().unwrap();
    let shared = tempfile::tempdir().unwrap();
    let mut shell = boxd();
    shell.env("BOXD_SERVER_STATE_DIR", empty_dir.path());
    shell.args(["shell", "--workspace"]).arg(shared.path());
    let mut terminal = Terminal::new(&mut shell, 100);
    terminal.types("echo $((40 + 2)) > f; tty; exit 5\n");
    terminal.shows("/dev/pts/");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(5));
    let written = std::fs::read_to_string(shared.path().join("f")).unwrap();
    assert_eq!(written, "42\n");
    // A name means a box that stays, which only a server can keep.
    let mut named = boxd();
    named.env("BOXD_SERVER_STATE_DIR", empty_dir.path());
    let refused = named.args(["shell", "work"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    let stderr_text = String::from_utf8_lossy(&refused.stderr);
    assert!(stderr_text.contains("boxd serve"), "{stderr_text}");
}

#[test]
fn an_interrupt_reaches_the_command_and_a_second_ends_it() {
    let mut polite = boxd();
    polite.args([
        "run",
        "trap 'echo asked; exit 3' INT; echo up; while :; do sleep 0.1; done",
    ]);
    let mut child = polite.stdout(Stdio::piped()).spawn().unwrap();
    let mut up = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
    let interrupt = |child: &Child| {
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    };
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.stdout.as_slice(), output.status.code()),
        (&b"asked\n"[..], Some(3))
    );
    let mut deaf = boxd();
    deaf.args(["run", "trap '' INT; echo up; while :; do sleep 0.1; done"]);
    let mut child = deaf.stdout(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
    interrupt(&child);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(
        child.try_wait().unwrap().is_none(),
        "control: the first one is ignored"
    );
    // Two signals that arrive before the first is handled are one.
    eventually("the second ends it", || {
        interrupt(&child);
        std::thread::sleep(std::time::Duration::from_millis(300));
        child.try_wait().unwrap().is_some()
    });
    assert_eq!(child.wait().unwrap().code(), Some(137));
}

/// Whether the terminal echoes input, as it does in its normal mode.
fn echoes(terminal: &Terminal) -> bool {
    let modes = rustix::termios::tcgetattr(&terminal.controller).unwrap();
    modes
        .local_modes
        .contains(rustix::termios::LocalModes::ECHO | rustix::termios::LocalModes::ICANON)
}

fn tell(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn a_quit_signal_reaches_the_command_and_the_terminal_is_restored() {
    let script = "trap 'exit 4' QUIT; echo up; while :; do sleep 0.1; done";
    let mut terminal = Terminal::new(boxd().args(["run", "-t", script]), 100);
    terminal.shows("up");
    assert!(!echoes(&terminal), "control: the terminal is in raw mode");
    tell(&terminal.child, rustix::process::Signal::QUIT);
    assert_eq!(terminal.child.wait().unwrap().code(), Some(4));
    assert!(echoes(&terminal));
}

#[test]
fn a_shell_ends_with_its_terminal_or_its_input() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let mut terminal = Terminal::new(&mut server.boxd(&["shell", "b"]), 100);
    terminal.types("echo $((40 + 2))\n");
    terminal.shows("42");
    tell(&terminal.child, rustix::process::Signal::TERM);
    assert_eq!(terminal.child.wait().unwrap().code(), Some(129));
    assert!(echoes(&terminal));
    // The end of input arrives while the shell takes over its terminal. Repeated, because it is a
    // race.
    for _ in 0..5 {
        assert!(server.run(&["shell", "b"]).status.success());
    }
    let ran = super::support::feed(&mut server.boxd(&["shell", "b"]), b"echo $((40 + 2))\n");
    assert!(super::support::out(&ran).contains("42"), "{ran:?}");
}

#[test]
fn a_command_that_ignores_hangups_survives_one() {
    let hung_up = |before: &str| {
        let script = format!("{before} exec \"$0\" run 'echo up; sleep 1; exit 5'");
        let mut command = Command::new("sh");
        command.args(["-c", &script, super::support::BOXD]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut up = [0; 3];
        child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        tell(&child, rustix::process::Signal::HUP);
        child.wait().unwrap().code()
    };
    assert_eq!(hung_up("trap '' HUP;"), Some(5));
    assert_eq!(hung_up(""), Some(129), "control");
}

#[test]
fn a_stopped_server_blocks_no_client() {
    use rustix::process::Signal;
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let held = |arguments: &[&str], signals: &[Signal]| {
        let mut terminal = Terminal::new(&mut server.boxd(arguments), 100);
        terminal.shows("up");
        server.signal(Signal::STOP);
        let mut signals = signals.iter();
        let mut code = None;
        eventually("it ends", || {
            if let Some(signal) = signals.next() {
                tell(&terminal.child, *signal);
                // Two signals that arrive before the first is handled are one.
                std::thread::sleep(std::time::Duration::from_millis(500));
            }
            code = terminal.child.try_wait().unwrap();
            code.is_some()
        });
        server.signal(Signal::CONT);
        assert!(echoes(&terminal));
        terminal.shows("the server does not respond");
        code.unwrap().code()
    };
    let script = "trap '' INT TERM; echo up; while :; do sleep 0.1; done";
    let exec = ["exec", "b", script];
    assert_eq!(held(&exec, &[Signal::TERM]), Some(143));
    assert_eq!(held(&exec, &[Signal::INT; 9]), Some(130));
    let exec = ["exec", "-t", "b", script];
    assert_eq!(held(&exec, &[Signal::TERM]), Some(143));
    // A run that ends with its command has a box to delete.
    assert_eq!(
        held(&["run", "echo up; exec sleep 100"], &[Signal::TERM]),
        Some(143)
    );
}

#[test]
fn a_background_client_does_not_read_the_terminal() {
    let mut bash = Command::new("setsid");
    bash.args(["--ctty", "bash", "--norc", "-i"]);
    let mut terminal = Terminal::new(&mut bash, 100);
    let boxd = super::support::BOXD;
    terminal.types(&format!("{boxd} run 'sleep 1; echo do''ne; cat' &\n"));
    terminal.shows("done");
    terminal.types("jobs; echo for $((40 + 2))\n");
    terminal.shows("for 42");
    let screen = String::from_utf8_lossy(&terminal.screen.lock().unwrap()).into_owned();
    assert!(
        screen.contains("Running") && !screen.contains("Stopped"),
        "{screen}"
    );
    // In the foreground it reads again.
    terminal.types("fg\n");
    std::thread::sleep(std::time::Duration::from_millis(500));
    terminal.types("ty''ped\n");
    eventually("it is read", || {
        let screen = terminal.screen.lock().unwrap();
        String::from_utf8_lossy(&screen).matches("ty''ped").count() >= 2
    });
    terminal.types("\x04");
    terminal.types("exit\n");
    terminal.child.wait().unwrap();
}

#[test]
fn no_stdin_leaves_the_lines_of_a_loop_unread() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let script = "while read line; do \"$0\" exec $1 b \"echo got $line; cat\"; done";
    let looped = |option: &str| {
        let mut command = Command::new("sh");
        command
            .args(["-c", script, super::support::BOXD, option])
            .env("BOXD_ENDPOINT", &server.endpoints[0]);
        super::support::out(&super::support::feed(&mut command, b"a\nb\n"))
    };
    assert_eq!(looped("-n"), "got a\ngot b\n");
    assert_eq!(looped(""), "got a\nb\n", "control");
}

#[test]
fn long_lines_wrap_at_words() {
    for arguments in [&["doctor"][..], &["run", "--help"]] {
        let mut terminal = Terminal::new(boxd().args(arguments), 60);
        terminal.child.wait().unwrap();
        terminal.shows("box");
        let screen = terminal.screen.lock().unwrap();
        let screen = String::from_utf8_lossy(&screen).replace('\r', "");
        for line in screen.lines() {
            let plain: String = without_colours(line);
            assert!(plain.chars().count() <= 60, "{plain:?}");
        }
        assert!(screen.lines().count() > 20, "{screen}");
    }
}

/// A line without its colour codes.
fn without_colours(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |seen, part| {
        seen + part.split_once('m').map_or(part, |(_, rest)| rest)
    })
}

#[test]
fn a_long_copy_shows_a_progress_bar() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, vec![7; 24 << 20]).unwrap();
    let file = file.to_str().unwrap();
    let mut terminal = Terminal::new(&mut server.boxd(&["cp", file, "b:/tmp/file"]), 100);
    terminal.shows(" of 24.00 MiB");
    assert!(terminal.child.wait().unwrap().success());
    // The last drawn line is empty.
    eventually("the bar is gone", || {
        let screen = terminal.screen.lock().unwrap();
        screen.ends_with(b"\r\x1b[2K") || screen.ends_with(b"\x1b[K")
    });
    assert_eq!(
        server.ok(&["exec", "b", "stat -c %s /tmp/file"]),
        "25165824\n"
    );
    let piped = server.run(&[
        "cp",
        "b:/tmp/file",
        directory.path().join("back").to_str().unwrap(),
    ]);
    assert_eq!(
        (piped.status.code(), super::support::err(&piped).as_str()),
        (Some(0), "")
    );
}

#[test]
fn an_interrupted_pull_leaves_no_bars() {
    // It accepts connections and never answers.
    let registry = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("{}/app:1", registry.local_addr().unwrap());
    let state = tempfile::tempdir().unwrap();
    let mut pull = boxd();
    pull.env("BOXD_SERVER_STATE_DIR", state.path());
    let mut terminal = Terminal::new(pull.args(["image", "pull", &name]), 60);
    terminal.shows("asking the registry");
    tell(&terminal.child, rustix::process::Signal::INT);
    assert_eq!(terminal.child.wait().unwrap().code(), Some(130));
    terminal.shows("boxd: interrupted");
    let screen = String::from_utf8_lossy(&terminal.screen.lock().unwrap()).into_owned();
    let (bars, _) = screen.rsplit_once("boxd: interrupted").unwrap();
    let (_, after) = bars.rsplit_once("asking the registry").unwrap();
    assert!(after.contains("\x1b[2K"), "{screen:?}");
}

#[test]
fn stats_are_redrawn_on_a_terminal() {
    let server = Server::start();
    server.ok(&["run", "--name", "b", "true"]);
    let mut terminal = Terminal::new(&mut server.boxd(&["stats"]), 100);
    eventually("it is drawn twice", || {
        let screen = terminal.screen.lock().unwrap();
        String::from_utf8_lossy(&screen)
            .matches("\x1b[H\x1b[J")
            .count()
            >= 2
    });
    terminal.shows("\x1b[1mBOX");
    terminal.child.kill().unwrap();
    terminal.child.wait().unwrap();
    let mut plain = Terminal::new(server.boxd(&["ps"]).env("NO_COLOR", "1"), 100);
    plain.shows("BOX");
    plain.child.wait().unwrap();
    assert!(!String::from_utf8_lossy(&plain.screen.lock().unwrap()).contains("\x1b[1m"));
}
