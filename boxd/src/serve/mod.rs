//! `boxd serve`: a runtime and its policy behind the configured listeners.
//!
//! 1. This file: the order of startup and shutdown.
//! 2. `tokens`: the tokens of network callers.
//! 3. `doors`: the RPC listeners, and how each authenticates its callers.
//! 4. `http`: the HTTP port. `share`: addresses of it that are credentials.
//! 5. `owned`: files that must belong to this user. `ready`: notification that startup is complete.

mod check;
mod doors;
pub(crate) mod http;
mod memory;
mod owned;
mod ready;
mod share;
mod tokens;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use box_protocol::actions::SystemShutdownParams;
use box_runtime::Caller;
use box_service::paths::real_path;
use tokio::signal::unix::{SignalKind, signal};

pub(crate) use self::check::check;
use self::doors::Doors;
use self::http::caps::Key;
use self::http::{Http, Port};
use self::tokens::Tokens;
use crate::args::{Arguments, ServeArguments};
use crate::config::{self, Config, Flag, ServerSection, Values};
use crate::connect::{SOCKET, usual_state_dir};
use crate::local::Boxes;
use crate::{FAILED, complaint, langbot, log, output};

/// Reads the configuration and applies the command-line options to it.
fn read(asked: &ServeArguments) -> Result<(Config, Values)> {
    let file = asked.config.config.as_deref();
    let (mut config, values) = config::load(file, config::variables()?, flags(asked))?;
    // Only the user of this process and root can open the Unix socket.
    config.policy.owner_mounts = true;
    for root in asked.allow_mount.iter().map(std::path::absolute) {
        config.policy.allowed_host_mount_roots.push(root?);
    }
    Ok((config, values))
}

/// Runs `boxd serve`.
pub(crate) async fn run(arguments: &Arguments, asked: &ServeArguments) -> Result<ExitCode> {
    let (mut config, values) = read(asked)?;
    log::start(&config.log)?;
    // Install the handlers before the server starts anything that needs an orderly shutdown.
    let mut reload = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if asked.langbot.is_some() {
        langbot::make_room(&mut config, &values);
    }
    let state = match &config.server.state_dir {
        Some(directory) => directory.clone(),
        None => usual_state_dir()?,
    };
    own_directory(&state)?;
    let private = private_paths(&state, &config.server)?;
    config.policy.private.clone_from(&private);
    let tokens = Tokens::read(config.server.token_file.as_deref())?;
    tokens.check_tables(&config.policy)?;
    let mut ports: Vec<Port> = Port::bind(&config.server, &tokens)
        .await?
        .into_iter()
        .collect();
    if let Some(address) = &asked.langbot {
        ports.push(langbot_port(address, &config.server, &tokens).await?);
    }
    let boxes = Boxes::start(&config, Some(&state), config.policy.clone())?;
    let guarded = !tokens.is_empty() || langbot::token().is_ok_and(|token| token.is_some());
    let langbot = langbot::start(
        &config,
        &boxes,
        Some(Caller::token(langbot::OWNER)),
        guarded,
    )?;
    let key = Key::of(&state)?;
    let shared_by = ports.first().filter(|_| config.server.http.is_some());
    let url = shared_by.map(|port| port.url(&config.server));
    let router = share::router(&boxes, key.clone(), url);
    let serve =
        |port: Port| port.serve(boxes.runtime.clone(), router.clone(), key.clone(), &langbot);
    let http: Vec<Http> = ports.into_iter().map(serve).collect();
    let adopted = boxes.runtime.adopt().await.with_context(|| {
        let state = state.display();
        format!("state directory {state} (--state-dir)")
    })?;
    tracing::info!(adopted, "boxes of an earlier server");
    let opened = async {
        boxes.service.initialize().await?;
        let listen = endpoints(&config.server, &state);
        Doors::open(&config.server, &listen, &router, &tokens).await
    };
    let doors = match opened.await {
        Ok(doors) => doors,
        Err(error) => {
            complaint::tell(arguments, &error);
            leave_boxes(FAILED);
        }
    };
    let mut addresses = doors.addresses();
    for http in &http {
        http.ready(doors.gauges());
        addresses.push(http.address());
    }
    // A server also works if no process reads its output.
    let _ = output::say(&ready::line(&addresses));
    ready::notify("READY=1");
    tokio::spawn(memory::give_back());

    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = boxes.runtime.exit_requested() => break,
            _ = reload.recv() => {
                let reloaded = async {
                    let (mut config, _) = read(asked)?;
                    tokens.check_tables(&config.policy)?;
                    config.policy.private.clone_from(&private);
                    boxes.reload(config).await
                };
                match reloaded.await {
                    Ok(()) => tracing::info!("policy read again"),
                    Err(error) => tracing::error!("policy stays as it was: {error:#}"),
                }
            }
        }
    }
    ready::notify("STOPPING=1");
    tokio::select! {
        () = stop(&config, doors, http, &boxes) => {}
        _ = terminate.recv() => leave_at_once(SignalKind::terminate()),
        _ = interrupt.recv() => leave_at_once(SignalKind::interrupt()),
    }
    if config.server.keep_boxes {
        leave_boxes(0);
    }
    Ok(ExitCode::SUCCESS)
}

/// Exits and leaves the boxes to the next server.
///
/// Dropping the runtime would end them.
fn leave_boxes(code: u8) -> ! {
    std::process::exit(code.into())
}

/// Exits at once on a second signal, and leaves unfinished work to the next server.
fn leave_at_once(signal: SignalKind) -> ! {
    tracing::warn!("told again to stop: what still runs is left to the next server");
    std::process::exit(128 + signal.as_raw_value())
}

/// Waits for running calls, then deletes all boxes unless they are to be kept.
///
/// Each step has a time limit.
async fn stop(config: &Config, doors: Doors, http: Vec<Http>, boxes: &Boxes) {
    let within = Duration::from_secs(config.server.drain_sec);
    let keep = config.server.keep_boxes;
    tracing::info!(?within, keep_boxes = keep, "stopping");
    let http = http.into_iter().map(|http| http.close(within, keep));
    let http = futures::future::join_all(http);
    futures::future::join(doors.close(within, keep), http).await;
    if !keep {
        let within_ms = u64::try_from(within.as_millis()).ok();
        let all = SystemShutdownParams {
            within_ms,
            ..SystemShutdownParams::default()
        };
        match boxes.runtime.shutdown(&Caller::Local, all).await {
            Ok(result) => tracing::info!(boxes = result.ended, "boxes ended"),
            Err(error) => tracing::error!(%error, "boxes could not be ended"),
        }
    }
}

/// Binds the port for LangBot alone.
///
/// The port accepts LangBot's own token, or the other callers' tokens if LangBot has none.
async fn langbot_port(address: &str, section: &ServerSection, tokens: &Tokens) -> Result<Port> {
    let own = langbot::token()?;
    let usual = langbot::usual_address(own.as_deref());
    let others = || (!tokens.is_empty()).then(|| tokens.for_hello());
    let tokens = own.as_deref().map(langbot::tokens).or_else(others);
    let address = if address.is_empty() { &usual } else { address };
    let bound = Port::bind_for_langbot(address, section, tokens).await;
    bound.with_context(|| format!("LangBot at {address}"))
}

fn flags(asked: &ServeArguments) -> Vec<Flag> {
    let path = |path: &PathBuf| path.display().to_string().into();
    let mut flags = Vec::new();
    let mut set = |key, name, value| flags.push(Flag { key, name, value });
    if !asked.listen.is_empty() {
        let all = asked
            .listen
            .iter()
            .map(|endpoint| endpoint.clone().into())
            .collect();
        set("server.listen", "--listen", toml::Value::Array(all));
    }
    if let Some(http) = &asked.http {
        set("server.http", "--http", http.clone().into());
    }
    if let Some(directory) = &asked.state_dir {
        set("server.state_dir", "--state-dir", path(directory));
    }
    if let Some(backend) = &asked.backend {
        set("runtime.backend", "--backend", backend.clone().into());
    }
    if let Some(file) = &asked.token_file {
        set("server.token_file", "--token-file", path(file));
    }
    flags
}

/// Returns the configured endpoints, or one socket in the state directory.
fn endpoints(server: &ServerSection, state: &Path) -> Vec<String> {
    if server.listen.is_empty() {
        vec![format!("unix:{}", state.join(SOCKET).display())]
    } else {
        server.listen.clone()
    }
}

/// Returns the paths of this server that no box may mount.
fn private_paths(state: &Path, section: &ServerSection) -> Result<Vec<PathBuf>> {
    let files = section.token_file.iter().chain(&section.tls_key);
    let all = [state].into_iter().chain(files.map(PathBuf::as_path));
    let real = |path| anyhow::Ok(real_path(&std::path::absolute(path)?)?);
    all.map(real).collect()
}

/// Creates a directory that only this user can access.
fn own_directory(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(path)
        .with_context(|| format!("cannot make the state directory {}", path.display()))?;
    owned::check_state(path)
}
