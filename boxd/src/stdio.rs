//! `stdio`: serves boxes to the parent process over stdin and stdout. The boxes end with the connection.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use box_gateways::langbot::{ChunkedConnection, Frames, INSTANCE_VARIABLE, LangBot};
use box_protocol::actions::SystemShutdownParams;
use box_rpc::{Codecs, Connection, ControlPolicy, Limits, Options, Router, Session};
use box_runtime::Caller;
use box_transports::stdio;

use crate::args::StdioArgs;
use crate::config::{self, Config};
use crate::embedded::EmbeddedServer;
use crate::serve::http::{BoundPort, HttpServer};
use crate::serve::url_key;
use crate::{langbot, log};

/// How long calls may run after LangBot has closed the pipe.
///
/// LangBot waits two seconds, including the cleanup.
const LANGBOT_DRAIN: Duration = Duration::from_millis(500);

/// `boxd stdio`.
pub(crate) async fn run(args: &StdioArgs) -> Result<ExitCode> {
    let (mut config, values) = config::load(
        args.config.config.as_deref(),
        config::variables()?,
        Vec::new(),
    )?;
    log::start(&config.log)?;
    let mut limits = Limits::default();
    if args.langbot {
        langbot::raise_box_limit(&mut config, &values);
        limits.drain = LANGBOT_DRAIN;
    }
    let instance = langbot::instance()?;
    let mut connection: Box<dyn Connection> = Box::new(stdio::serve(&limits)?);
    let embedded = EmbeddedServer::start(&config, None, config.policy.clone())?;
    embedded.service.initialize().await?;
    let mut options = Options {
        limits,
        ..Options::new(Caller::Local)
    };
    let (router, http) = if args.langbot {
        let instance = instance
            .with_context(|| format!("{INSTANCE_VARIABLE} is required for stdio Box control"))?;
        let ((router, policy), http) = for_langbot(args, &config, &embedded, &instance).await?;
        connection = Box::new(ChunkedConnection::new(connection, &options.limits));
        options.codecs = Codecs::Only(&Frames);
        options.control_policy = Some(policy);
        (router, http)
    } else {
        (embedded.service.router(), None)
    };
    let session = Session::start_boxed(connection, router, options);
    tokio::select! {
        _ = session.closed() => {}
        () = embedded.runtime.exit_requested() => session.close(Duration::from_secs(config.server.drain_sec)).await,
    }
    let all = SystemShutdownParams::default();
    embedded.runtime.shutdown(&Caller::Local, all).await?;
    if let Some(http) = http {
        http.close(Duration::ZERO, false).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// LangBot's actions for the pipe, and the listener for its managed processes, if its port is free.
async fn for_langbot(
    args: &StdioArgs,
    config: &Config,
    embedded: &EmbeddedServer,
    instance: &str,
) -> Result<((Router, Arc<dyn ControlPolicy>), Option<HttpServer>)> {
    let token = langbot::token()?;
    let owner = langbot::owner(token.as_deref());
    let gateway: Arc<LangBot> = langbot::start(config, embedded, Some(owner.clone()), true)?;
    let installation = gateway
        .installation(&owner, instance)
        .context(INSTANCE_VARIABLE)?;
    let address = format!("127.0.0.1:{}", args.ws_control_port);
    let tokens = token.as_deref().map(langbot::tokens);
    let http = match BoundPort::bind_for_langbot(&address, &config.server, tokens).await {
        Ok(port) => {
            let router = embedded.service.router();
            let http = port.serve(embedded, router, url_key::ephemeral()?, &gateway);
            http.ready(Vec::new());
            tracing::info!(address = http.address(), "listening for managed processes");
            Some(http)
        }
        Err(error) => {
            tracing::warn!("managed processes are unavailable: {address}: {error:#}");
            None
        }
    };
    Ok((installation.serve(true), http))
}
