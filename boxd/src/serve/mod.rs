//! `boxd serve`: a runtime and its policy behind the configured listeners.
//!
//! 1. This file: the order of startup and shutdown.
//! 2. `tokens`: the tokens of network callers.
//! 3. `listeners`: the RPC listeners, and how each authenticates its callers.
//! 4. `http`: the HTTP port. `share`: addresses of it that are credentials. `url_key`: their key.
//! 5. `trusted_file`: files that must belong to this user. `ready`: notification that startup is complete.

mod check;
pub(crate) mod http;
mod listeners;
mod memory;
mod ready;
mod share;
mod tokens;
mod trusted_file;
pub(crate) mod url_key;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use box_protocol::actions::SystemShutdownParams;
use box_runtime::Caller;
use box_service::paths::real_path;
use tokio::signal::unix::{SignalKind, signal};

pub(crate) use self::check::check;
use self::http::pages::Origins;
use self::http::{BoundPort, HttpServer};
use self::listeners::Listeners;
use self::tokens::Tokens;
pub(crate) use self::tokens::check_name as check_token_name;
use crate::args::{Cli, ServeArgs};
use crate::config::{self, Config, Flag, ServerSection, Values};
use crate::connect::SOCKET;
use crate::embedded::EmbeddedServer;
use crate::{EXIT_FAILED, error_report, langbot, log, output};

/// Reads the configuration and applies the command-line options to it.
fn read(args: &ServeArgs) -> Result<(Config, Values)> {
    let file = args.config.config.as_deref();
    let (mut config, values) = config::load(file, config::variables()?, flags(args))?;
    // Only the user of this process and root can open the Unix socket.
    config.policy.owner_mounts = true;
    for root in args.allow_mount.iter().map(std::path::absolute) {
        config.policy.allowed_host_mount_roots.push(root?);
    }
    Ok((config, values))
}

/// Runs `boxd serve`.
pub(crate) async fn run(cli: &Cli, args: &ServeArgs) -> Result<ExitCode> {
    let (mut config, values) = read(args)?;
    log::start(&config.log)?;
    // Install the handlers before the server starts anything that needs an orderly shutdown.
    let mut reload = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if args.langbot.is_some() {
        langbot::raise_box_limit(&mut config, &values);
    }
    let state = config.state_dir()?;
    create_state_dir(&state)?;
    let private = private_paths(&state, &config.server)?;
    config.policy.private.clone_from(&private);
    let tokens = Tokens::read(config.server.token_file.as_deref())?;
    tokens.check_policy(&config.policy)?;
    Origins::new(&config.server.allowed_origins, !tokens.is_empty())?;
    let listen = endpoints(&config.server, &state);
    for text in &listen {
        listeners::check(text, &config.server, &tokens)?;
    }
    let ports = bind_ports(args, &config.server, &tokens).await?;
    let embedded = EmbeddedServer::start(&config, Some(&state), config.policy.clone())?;
    let guarded = !tokens.is_empty() || langbot::token().is_ok_and(|token| token.is_some());
    let langbot = langbot::start(
        &config,
        &embedded,
        Some(Caller::token(langbot::OWNER)),
        guarded,
    )?;
    let key = url_key::load_or_create(&state)?;
    let shared_by = ports.first().filter(|_| config.server.http.is_some());
    let url = shared_by.map(|port| port.url(&config.server));
    let router = share::router(&embedded, key.clone(), url);
    let serve = |port: BoundPort| port.serve(&embedded, router.clone(), key.clone(), &langbot);
    let http: Vec<HttpServer> = ports.into_iter().map(serve).collect();
    let adopted = embedded.runtime.adopt().await.with_context(|| {
        let state = state.display();
        format!("state directory {state} (--state-dir)")
    })?;
    tracing::info!(adopted, "adopted the boxes of an earlier server");
    let opened = async {
        embedded.service.initialize().await?;
        Listeners::open(&config.server, &listen, &router, &tokens).await
    };
    let listeners = match opened.await {
        Ok(listeners) => listeners,
        Err(error) => {
            error_report::print(cli, &error);
            exit_keeping_boxes(EXIT_FAILED);
        }
    };
    let mut addresses = listeners.addresses();
    for http in &http {
        http.ready(listeners.metrics());
        addresses.push(http.address());
    }
    // A server also works if no process reads its output.
    let _ = output::print(&ready::line(&addresses));
    ready::notify("READY=1");
    tokio::spawn(memory::release_after_bursts());

    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = embedded.runtime.exit_requested() => break,
            _ = reload.recv() => {
                let reloaded = async {
                    let (mut config, _) = read(args)?;
                    tokens.check_policy(&config.policy)?;
                    config.policy.private.clone_from(&private);
                    embedded.reload(config).await
                };
                match reloaded.await {
                    Ok(()) => tracing::info!("policy reloaded"),
                    Err(error) => tracing::error!("policy not reloaded; the old one stays active: {error:#}"),
                }
            }
        }
    }
    ready::notify("STOPPING=1");
    tokio::select! {
        () = stop(&config, listeners, http, &embedded) => {}
        _ = terminate.recv() => exit_at_once(SignalKind::terminate()),
        _ = interrupt.recv() => exit_at_once(SignalKind::interrupt()),
    }
    if config.server.keep_boxes {
        exit_keeping_boxes(0);
    }
    Ok(ExitCode::SUCCESS)
}

/// Exits and leaves the boxes to the next server.
///
/// Dropping the runtime would end them.
fn exit_keeping_boxes(code: u8) -> ! {
    std::process::exit(code.into())
}

/// Exits at once on a second signal, and leaves unfinished work to the next server.
fn exit_at_once(signal: SignalKind) -> ! {
    tracing::warn!("second signal; exiting without waiting for running calls and boxes");
    std::process::exit(128 + signal.as_raw_value())
}

/// Waits for running calls, then ends the boxes in pools, and all others unless they are to be kept.
///
/// Each step has a time limit.
async fn stop(
    config: &Config,
    listeners: Listeners,
    http: Vec<HttpServer>,
    embedded: &EmbeddedServer,
) {
    let within = Duration::from_secs(config.server.drain_sec);
    let keep = config.server.keep_boxes;
    tracing::info!(?within, keep_boxes = keep, "stopping");
    let http = http.into_iter().map(|http| http.close(within, keep));
    let http = futures::future::join_all(http);
    futures::future::join(listeners.close(within, keep), http).await;
    embedded.runtime.close_pools(within).await;
    if !keep {
        let within_ms = u64::try_from(within.as_millis()).ok();
        let all = SystemShutdownParams {
            within_ms,
            ..SystemShutdownParams::default()
        };
        match embedded.runtime.shutdown(&Caller::Local, all).await {
            Ok(result) => tracing::info!(boxes = result.ended, "boxes deleted"),
            Err(error) => tracing::error!(%error, "cannot delete the boxes"),
        }
    }
}

/// Binds the HTTP port and the port for LangBot, if configured.
async fn bind_ports(
    args: &ServeArgs,
    section: &ServerSection,
    tokens: &Tokens,
) -> Result<Vec<BoundPort>> {
    let mut ports: Vec<_> = BoundPort::bind(section, tokens)
        .await?
        .into_iter()
        .collect();
    if let Some(address) = &args.langbot {
        ports.push(langbot_port(address, section, tokens).await?);
    }
    Ok(ports)
}

/// Binds the port for LangBot alone.
///
/// The port accepts LangBot's own token, or the other callers' tokens if LangBot has none.
async fn langbot_port(
    address: &str,
    section: &ServerSection,
    tokens: &Tokens,
) -> Result<BoundPort> {
    let langbot_token = langbot::token()?;
    let default_address = langbot::default_address(langbot_token.as_deref());
    let others = || (!tokens.is_empty()).then(|| tokens.to_rpc());
    let tokens = langbot_token
        .as_deref()
        .map(langbot::tokens)
        .or_else(others);
    let address = if address.is_empty() {
        &default_address
    } else {
        address
    };
    let bound = BoundPort::bind_for_langbot(address, section, tokens).await;
    bound.context("--langbot")
}

fn flags(args: &ServeArgs) -> Vec<Flag> {
    let path = |path: &PathBuf| path.display().to_string().into();
    let mut flags = Vec::new();
    let mut set = |key, name, value| flags.push(Flag { key, name, value });
    if !args.listen.is_empty() {
        let all = args
            .listen
            .iter()
            .map(|endpoint| endpoint.clone().into())
            .collect();
        set("server.listen", "--listen", toml::Value::Array(all));
    }
    if let Some(http) = &args.http {
        set("server.http", "--http", http.clone().into());
    }
    if let Some(directory) = &args.state_dir {
        set("server.state_dir", "--state-dir", path(directory));
    }
    if let Some(backend) = &args.backend {
        set("runtime.backend", "--backend", backend.clone().into());
    }
    if let Some(file) = &args.token_file {
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
fn create_state_dir(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(path)
        .with_context(|| format!("cannot create the state directory {}", path.display()))?;
    trusted_file::check_state(path)
}
