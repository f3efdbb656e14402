//! Forwards signals of this process to the running command.

use std::future::{Future, pending};
use std::io;
use std::time::Duration;

use box_client::{ClientError, CommandControl};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::{output, terminal};

/// How long a server may take to confirm a signal. Afterwards the signal ends this process.
pub(crate) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a command may take to end after its terminal has gone.
const GRACE: Duration = Duration::from_secs(5);

/// The command, once it has started.
type Started = watch::Receiver<Option<CommandControl>>;

/// A forwarded signal: its number and its name.
pub(crate) type ForwardedSignal = (i32, &'static str);

/// The signals of this process, caught before the command starts so that none is lost.
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    quit: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
    resized: Option<Signal>,
}

impl Signals {
    /// Catches signals, except those that were ignored at the start, as with `nohup`.
    pub(crate) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let caught = |kind: SignalKind| {
            let bit = u32::try_from(kind.as_raw_value() - 1).unwrap_or(0);
            let is_caught = ignored.checked_shr(bit).unwrap_or(0) & 1 == 0;
            is_caught.then(|| signal(kind)).transpose()
        };
        Ok(Self {
            interrupt: caught(SignalKind::interrupt())?,
            quit: caught(SignalKind::quit())?,
            terminate: caught(SignalKind::terminate())?,
            hangup: caught(SignalKind::hangup())?,
            resized: caught(SignalKind::window_change())?,
        })
    }

    /// The next signal for the command.
    pub(crate) async fn next(&mut self) -> ForwardedSignal {
        let number = |kind: SignalKind| kind.as_raw_value();
        tokio::select! {
            () = received(&mut self.interrupt) => (number(SignalKind::interrupt()), "INT"),
            () = received(&mut self.quit) => (number(SignalKind::quit()), "QUIT"),
            () = received(&mut self.terminate) => (number(SignalKind::terminate()), "TERM"),
            () = received(&mut self.hangup) => (number(SignalKind::hangup()), "HUP"),
        }
    }

    /// Runs work until a signal, whose number is the error.
    pub(crate) async fn until<T>(mut self, work: impl Future<Output = T>) -> Result<T, i32> {
        tokio::select! {
            done = work => Ok(done),
            (number, _) = self.next() => Err(number),
        }
    }

    /// Forwards signals to the command; a second one kills it.
    ///
    /// On a terminal, keys such as Ctrl-C are input already. Returns the number of a signal that could not be forwarded.
    pub(crate) async fn forward(mut self, command: Started, tty: bool) -> i32 {
        let mut forwarding = JoinSet::new();
        let mut resized = self.resized.take();
        let mut repeated = false;
        loop {
            tokio::select! {
                signal = self.next() => {
                    forwarding.spawn(forward_one(command.clone(), signal, tty, repeated));
                    repeated = true;
                }
                () = received(&mut resized) => {
                    let size = terminal::size().filter(|_| tty);
                    if let (Some((cols, rows)), Some(command)) = (size, command.borrow().clone()) {
                        forwarding.spawn(async move {
                            let _ = command.resize(cols, rows).await;
                            Ok(())
                        });
                    }
                }
                Some(forwarded) = forwarding.join_next(), if !forwarding.is_empty() => {
                    if let Ok(Err(signal)) = forwarded {
                        return signal;
                    }
                }
            }
        }
    }
}

/// Forwards one signal; returns its number if the server did not confirm it.
async fn forward_one(
    mut command: Started,
    (number, name): ForwardedSignal,
    tty: bool,
    repeated: bool,
) -> Result<(), i32> {
    // The end of this process takes the terminal away. A shell on a terminal ignores every signal but a hangup.
    let hangs_up = tty && !repeated && matches!(name, "TERM" | "HUP");
    let forwarded = async {
        let Some(command) = wait_started(&mut command).await else {
            return Ok(());
        };
        match (repeated, hangs_up) {
            (true, _) => command.kill().await,
            (false, true) => command.signal("HUP").await,
            (false, false) => command.signal(name).await,
        }
    };
    confirmed(forwarded, number).await?;
    if hangs_up {
        tokio::time::sleep(GRACE).await;
        let command = command.borrow().clone();
        if let Some(command) = command {
            confirmed(command.kill(), number).await?;
        }
    }
    Ok(())
}

/// Waits for the start of the command; `None` if it does not start.
async fn wait_started(command: &mut Started) -> Option<CommandControl> {
    let started = command.wait_for(Option::is_some).await;
    started.ok().and_then(|command| command.clone())
}

async fn confirmed(
    confirmation: impl Future<Output = Result<(), ClientError>>,
    number: i32,
) -> Result<(), i32> {
    match timeout(CONFIRM_TIMEOUT, confirmation).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(number),
    }
}

/// Runs work without a command; after a signal it has a short time to finish.
pub(crate) async fn finish_before_exit<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    let Ok(mut signals) = Signals::listen() else {
        return work.await;
    };
    let number = tokio::select! {
        done = &mut work => return done,
        (number, _) = signals.next() => number,
    };
    match timeout(CONFIRM_TIMEOUT, work).await {
        Ok(done) => done,
        Err(_) => exit_by_signal(number),
    }
}

/// Runs work that a signal ends, with this process.
///
/// Signals that were caught once do not end a process by themselves.
pub(crate) async fn or_exit<T>(work: impl Future<Output = T>) -> T {
    let Ok(signals) = Signals::listen() else {
        return work.await;
    };
    match signals.until(work).await {
        Ok(done) => done,
        Err(number) => std::process::exit(128 + number),
    }
}

/// Exits as if by the signal. The caller must have restored the terminal.
pub(crate) fn exit_by_signal(number: i32) -> ! {
    output::eprintln("boxd: the server does not respond; commands on it may still be running");
    std::process::exit(128 + number)
}

async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => pending().await,
    }
}

/// The signals that this process ignores, as a bit mask.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .unwrap_or_default();
    u64::from_str_radix(line.trim(), 16).unwrap_or(0)
}
