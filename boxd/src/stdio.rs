//! `stdio`: serves boxes to the parent process over stdin and stdout. The boxes end with the connection.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use box_gateways::langbot::{Frames, INSTANCE_VARIABLE, InPieces, LangBot};
use box_protocol::actions::SystemShutdownParams;
use box_rpc::{Codecs, Connection, ControlPolicy, Limits, Options, Router, Session};
use box_runtime::Caller;
use box_transports::stdio;

use crate::args::StdioArguments;
use crate::config::{self, Config};
use crate::local::Boxes;
use crate::serve::http::caps::Key;
use crate::serve::http::{Http, Port};
use crate::{langbot, log};

/// How long calls may run after LangBot has closed the pipe.
///
/// LangBot waits two seconds, including the cleanup.
const LANGBOT_DRAIN: Duration = Duration::from_millis(500);

/// `boxd stdio`.
pub(crate) async fn run(asked: &StdioArguments) -> Result<ExitCode> {
    let (mut config, values) = config::load(
        asked.config.config.as_deref(),
        config::variables()?,
        Vec::new(),
    )?;
    log::start(&config.log)?;
    let mut limits = Limits::default();
    if asked.langbot {
        langbot::make_room(&mut config, &values);
        limits.drain = LANGBOT_DRAIN;
    }
    let instance = langbot::instance()?;
    let mut connection: Box<dyn Connection> = Box::new(stdio::serve(&limits)?);
    let boxes = Boxes::start(&config, None, config.policy.clone())?;
    boxes.service.initialize().await?;
    let mut options = Options {
        limits,
        ..Options::new(Caller::Local)
    };
    let (router, http) = if asked.langbot {
        let instance = instance
            .with_context(|| format!("{INSTANCE_VARIABLE} is required for stdio Box control"))?;
        let ((router, policy), http) = for_langbot(asked, &config, &boxes, &instance).await?;
        connection = Box::new(InPieces::over(connection, &options.limits));
        options.codecs = Codecs::Only(&Frames);
        options.control_policy = Some(policy);
        (router, http)
    } else {
        (boxes.service.router(), None)
    };
    let session = Session::start_boxed(connection, router, options);
    tokio::select! {
        _ = session.closed() => {}
        () = boxes.runtime.exit_requested() => session.close(Duration::from_secs(config.server.drain_sec)).await,
    }
    let all = SystemShutdownParams::default();
    boxes.runtime.shutdown(&Caller::Local, all).await?;
    if let Some(http) = http {
        http.close(Duration::ZERO, false).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// LangBot's actions for the pipe, and the listener for its managed processes, if its port is free.
async fn for_langbot(
    asked: &StdioArguments,
    config: &Config,
    boxes: &Boxes,
    instance: &str,
) -> Result<((Router, Arc<dyn ControlPolicy>), Option<Http>)> {
    let token = langbot::token()?;
    let owner = langbot::owner(token.as_deref());
    let gateway: Arc<LangBot> = langbot::start(config, boxes, Some(owner.clone()), true)?;
    let host = gateway.host(&owner, instance).context(INSTANCE_VARIABLE)?;
    let address = format!("127.0.0.1:{}", asked.ws_control_port);
    let tokens = token.as_deref().map(langbot::tokens);
    let http = match Port::bind_for_langbot(&address, &config.server, tokens).await {
        Ok(port) => {
            let (runtime, router) = (boxes.runtime.clone(), boxes.service.router());
            let http = port.serve(runtime, router, Key::unkept()?, &gateway);
            http.ready(Vec::new());
            tracing::info!(address = http.address(), "listening for managed processes");
            Some(http)
        }
        Err(error) => {
            tracing::warn!("managed processes are unavailable: {address}: {error:#}");
            None
        }
    };
    Ok((host.serve(true), http))
}
