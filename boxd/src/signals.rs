//! What this process is told by signals while a command runs: they are the command's, unless nobody passes them on.

use std::future::{Future, pending};
use std::io;
use std::time::Duration;

use box_client::{ClientError, CommandControl};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::{output, terminal};

/// How long a server may take to say that it has passed a signal on. After that this process ends by it.
pub(crate) const ANSWER: Duration = Duration::from_secs(3);

/// How long what runs on a terminal may take to end once its terminal is gone.
const GRACE: Duration = Duration::from_secs(5);

/// The command, once it has started.
type Started = watch::Receiver<Option<CommandControl>>;

/// A signal that is passed on: its number, and its name.
pub(crate) type Told = (i32, &'static str);

/// What is listened to. From before the command begins, so that nothing is missed.
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    quit: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
    resized: Option<Signal>,
}

impl Signals {
    /// What was ignored when this process began stays so: `nohup` says it like that.
    pub(crate) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let heard = |kind: SignalKind| {
            let bit = u32::try_from(kind.as_raw_value() - 1).unwrap_or(0);
            let listened = ignored.checked_shr(bit).unwrap_or(0) & 1 == 0;
            listened.then(|| signal(kind)).transpose()
        };
        Ok(Self {
            interrupt: heard(SignalKind::interrupt())?,
            quit: heard(SignalKind::quit())?,
            terminate: heard(SignalKind::terminate())?,
            hangup: heard(SignalKind::hangup())?,
            resized: heard(SignalKind::window_change())?,
        })
    }

    /// The next that is meant for the command.
    pub(crate) async fn next(&mut self) -> Told {
        let number = |kind: SignalKind| kind.as_raw_value();
        tokio::select! {
            () = told(&mut self.interrupt) => (number(SignalKind::interrupt()), "INT"),
            () = told(&mut self.quit) => (number(SignalKind::quit()), "QUIT"),
            () = told(&mut self.terminate) => (number(SignalKind::terminate()), "TERM"),
            () = told(&mut self.hangup) => (number(SignalKind::hangup()), "HUP"),
        }
    }

    /// Ctrl-C and its kin go to the command; a second one ends it. A terminal's own keys are input there already. Returns only
    /// if one could not be passed on, with its number.
    pub(crate) async fn pass(mut self, command: Started, tty: bool) -> i32 {
        let mut passing = JoinSet::new();
        let mut resized = self.resized.take();
        let mut again = false;
        loop {
            tokio::select! {
                signal = self.next() => {
                    passing.spawn(pass_on(command.clone(), signal, tty, again));
                    again = true;
                }
                () = told(&mut resized) => {
                    let size = terminal::size().filter(|_| tty);
                    if let (Some((cols, rows)), Some(command)) = (size, command.borrow().clone()) {
                        passing.spawn(async move {
                            let _ = command.resize(cols, rows).await;
                            Ok(())
                        });
                    }
                }
                Some(passed) = passing.join_next(), if !passing.is_empty() => {
                    if let Ok(Err(signal)) = passed {
                        return signal;
                    }
                }
            }
        }
    }
}

/// Does what a signal says; its number if that was not answered.
async fn pass_on(
    mut command: Started,
    (number, name): Told,
    tty: bool,
    again: bool,
) -> Result<(), i32> {
    // Whoever ends this process takes the terminal away, and that is what is told to those who have it: a shell on a terminal
    // does not listen to anything else.
    let hangs_up = tty && !again && matches!(name, "TERM" | "HUP");
    let passed = async {
        let Some(command) = known(&mut command).await else {
            return Ok(());
        };
        match (again, hangs_up) {
            (true, _) => command.kill().await,
            (false, true) => command.signal("HUP").await,
            (false, false) => command.signal(name).await,
        }
    };
    answered(passed, number).await?;
    if hangs_up {
        tokio::time::sleep(GRACE).await;
        let command = command.borrow().clone();
        if let Some(command) = command {
            answered(command.kill(), number).await?;
        }
    }
    Ok(())
}

/// The command, once it has started; nothing if it never will.
async fn known(command: &mut Started) -> Option<CommandControl> {
    let started = command.wait_for(Option::is_some).await;
    started.ok().and_then(|command| command.clone())
}

async fn answered(
    asked: impl Future<Output = Result<(), ClientError>>,
    number: i32,
) -> Result<(), i32> {
    match timeout(ANSWER, asked).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(number),
    }
}

/// Work that no command is waited for in: a signal leaves it a little time, and no more.
pub(crate) async fn unless_told<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    let Ok(mut signals) = Signals::listen() else {
        return work.await;
    };
    let number = tokio::select! {
        done = &mut work => return done,
        (number, _) = signals.next() => number,
    };
    match timeout(ANSWER, work).await {
        Ok(done) => done,
        Err(_) => leave(number),
    }
}

/// Ends this process as the signal would have. The terminal must be as it was.
pub(crate) fn leave(number: i32) -> ! {
    output::complain("boxd: the server does not respond; commands on it may still be running");
    std::process::exit(128 + number)
}

async fn told(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => pending().await,
    }
}

/// The signals that this process ignores, a bit each.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .unwrap_or_default();
    u64::from_str_radix(line.trim(), 16).unwrap_or(0)
}
