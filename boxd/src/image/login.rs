//! `image login` and `image logout`: the password from stdin or the terminal.

use std::io::{self, BufRead as _, IsTerminal as _, Read as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;

use super::ImageClient;
use crate::args::{Cli, LoginArgs, LogoutArgs};
use crate::signals::Signals;
use crate::terminal::HiddenInput;
use crate::{output, terminal};

/// Maximum length of a password, in bytes.
const PASSWORD_BYTES: u64 = 64 << 10;

/// `boxd image login`.
pub(super) async fn login(cli: &Cli, args: &LoginArgs) -> Result<ExitCode> {
    ensure!(
        args.password.is_none(),
        "--password: every user of the machine can see arguments; use --password-stdin"
    );
    let registry = &args.registry;
    let (username, password) = tokio::select! {
        asked = ask(args) => asked?,
        exit = interrupted() => return exit,
    };
    let client = ImageClient::open(cli).await?;
    client.images().login(registry, username, password).await?;
    let text = format!("logged in to {}\n", output::visible(registry));
    output::print_or_json(cli.json, &text, &json!({"registry": registry}))?;
    Ok(ExitCode::SUCCESS)
}

/// `boxd image logout`.
pub(super) async fn logout(cli: &Cli, args: &LogoutArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    client.images().logout(&args.registry).await?;
    let text = format!("logged out of {}\n", output::visible(&args.registry));
    output::print_or_json(cli.json, &text, &json!({"registry": args.registry}))?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for a signal, and restores the terminal.
async fn interrupted() -> Result<ExitCode> {
    let (number, _) = Signals::listen()?.next().await;
    HiddenInput::restore();
    // The prompt has no line break.
    output::eprintln("");
    std::process::exit(128 + number)
}

/// Returns the user name and the password.
async fn ask(args: &LoginArgs) -> Result<(String, String)> {
    let (username, from_stdin) = (args.username.clone(), args.password_stdin);
    let registry = args.registry.clone();
    let asking = tokio::task::spawn_blocking(move || {
        if from_stdin {
            let username = username.context("--password-stdin: requires --username")?;
            return Ok((username, password_from_stdin()?));
        }
        ensure!(
            io::stdin().is_terminal(),
            "stdin is not a terminal; pass the password with --password-stdin"
        );
        let username = match username {
            Some(username) => username,
            None => line(&format!("User name for {registry}: "))?,
        };
        let hidden = HiddenInput::begin()?;
        let password = line(&format!("Password for {registry}: "));
        drop(hidden);
        output::eprintln("");
        Ok((username, password?))
    });
    asking.await?
}

fn password_from_stdin() -> Result<String> {
    terminal::wait_for_input();
    let mut text = String::new();
    let read = io::stdin()
        .lock()
        .take(PASSWORD_BYTES + 2)
        .read_to_string(&mut text);
    read.context("--password-stdin")?;
    let password = text.strip_suffix('\n').unwrap_or(&text);
    let password = password.strip_suffix('\r').unwrap_or(password);
    ensure!(!password.is_empty(), "--password-stdin: stdin is empty");
    Ok(password.to_owned())
}

/// Asks for a line on the terminal.
fn line(question: &str) -> Result<String> {
    output::eprint(question);
    let mut text = String::new();
    let length = io::stdin().lock().read_line(&mut text)?;
    if length == 0 {
        bail!("no input");
    }
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}
