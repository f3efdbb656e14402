//! `mcp` and `codex-exec`: serve boxes to the parent process over stdin and stdout, in the protocol of an AI client. The
//! boxes are those of this process, which end with it, or of a server.

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use box_protocol::actions::{BoxDelete, BoxDeleteParams, SystemShutdownParams};
use box_protocol::{BoxError, BoxId, SpecDraft};
use box_runtime::Caller;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{BoxOptions, Cli, FOREVER_MS, McpArgs};
use crate::config::Config;
use crate::embedded::EmbeddedServer;
use crate::{config, create, log, signals, values};

/// A protocol of AI clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// The Model Context Protocol.
    Mcp,
    /// The exec-server of OpenAI Codex.
    Codex,
}

impl Protocol {
    /// The box of calls that name none, in this process.
    fn default_box(self) -> &'static str {
        match self {
            Self::Mcp => "mcp",
            Self::Codex => "codex",
        }
    }

    /// Returns the spec of the default box.
    ///
    /// Codex names directories of this machine, so its workspace has the same path in the box.
    fn adapted(self, mut spec: SpecDraft) -> Result<SpecDraft> {
        if self == Self::Codex {
            let directory = match &spec.host_path {
                Some(workspace) => workspace.clone(),
                None => values::directory(".").context("current directory")?,
            };
            spec.mount_path = Some(directory);
        }
        // The client gets errors of options at once, and not in its first call.
        spec.clone().build()?;
        Ok(spec)
    }
}

/// The idle time of a temporary box of a server: a killed process cannot delete its box.
const TEMPORARY_IDLE_MS: u64 = 24 * 60 * 60 * 1000;

/// `boxd mcp` and `boxd codex-exec`.
pub(crate) async fn run(cli: &Cli, args: &McpArgs, protocol: Protocol) -> Result<ExitCode> {
    let options = &args.options;
    ensure!(
        !options.strict,
        "--strict: not available here; `boxd doctor` lists what this machine lacks"
    );
    let file = options.config.config.as_deref();
    let (config, _) = config::load(file, config::variables()?, Vec::new())?;
    log::start(&config.log)?;
    if cli.endpoint.is_some() || args.box_name.is_some() || options.needs_server() {
        Box::pin(serve_boxes_of_server(cli, args, protocol)).await?;
    } else {
        Box::pin(serve_own_boxes(config, args, protocol)).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves boxes of a runtime in this process.
async fn serve_own_boxes(mut config: Config, args: &McpArgs, protocol: Protocol) -> Result<()> {
    let options = &args.options;
    config.network.allow(&options.allow);
    if options.image.is_some() {
        config.state_dir().context("--image")?;
    }
    let spec = options.spec(protocol.default_box().to_owned())?;
    let spec = protocol.adapted(with_idle_time(spec, options, FOREVER_MS))?;
    let policy = create::policy(&config, options);
    let embedded = EmbeddedServer::start(&config, None, policy)?;
    embedded.service.initialize().await?;
    let (service, runtime) = (embedded.service.clone(), embedded.runtime.clone());
    let default = BoxId::new(protocol.default_box())?;
    let serve = async {
        use box_gateways::{codex, mcp};
        match protocol {
            Protocol::Mcp => mcp::serve_stdio(service, runtime, default, spec).await,
            Protocol::Codex => codex::serve_stdio(service, runtime, default, spec).await,
        }
    };
    let served = Box::pin(until_signal(serve)).await;
    let all = SystemShutdownParams::default();
    embedded.runtime.shutdown(&Caller::Local, all).await?;
    served
}

/// Serves boxes of a server. Without `--box`, the default box is a new one, which is deleted at the end.
async fn serve_boxes_of_server(cli: &Cli, args: &McpArgs, protocol: Protocol) -> Result<()> {
    let options = &args.options;
    let spec = match &args.box_name {
        Some(name) => create::named_spec(options, name)?,
        None => options.spec(format!("{}-{}", protocol.default_box(), BoxId::fresh()))?,
    };
    let idle_ms = match &args.box_name {
        Some(_) => FOREVER_MS,
        None => TEMPORARY_IDLE_MS,
    };
    let spec = protocol.adapted(with_idle_time(spec, options, idle_ms))?;
    let default = BoxId::new(spec.box_id.as_deref().unwrap_or_default())?;
    let client = create::connect(cli, options).await?;
    let (served_client, served_box) = (client.clone(), default.clone());
    let serve = async {
        use box_gateways::{codex, mcp};
        match protocol {
            Protocol::Mcp => mcp::serve_stdio_for(served_client, served_box, spec).await,
            Protocol::Codex => codex::serve_stdio_for(served_client, served_box, spec).await,
        }
    };
    let served = Box::pin(until_signal(serve)).await;
    if args.box_name.is_none() {
        let params = BoxDeleteParams {
            box_id: default,
            force: true,
        };
        let deleted = client.call::<BoxDelete>(&params);
        match signals::finish_before_exit(deleted).await {
            // No call has created it, or it was deleted.
            Err(error) if error.is_not_found() => {}
            deleted => drop(deleted?),
        }
    }
    served
}

/// Sets the idle time of the default box, unless an option sets it.
///
/// The user of an AI client may think for longer than the idle time of the server.
fn with_idle_time(mut spec: SpecDraft, options: &BoxOptions, idle_ms: u64) -> SpecDraft {
    let lifetime = spec.lifetime.get_or_insert_default();
    if options.ttl.is_none() && !options.keep {
        lifetime.idle_ms = Some(idle_ms);
    }
    spec
}

/// Serves until the client closes the input, or this process gets a signal to end.
async fn until_signal(serve: impl Future<Output = Result<(), BoxError>>) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        served = serve => Ok(served?),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}
