//! Connects to a server: the given endpoint, or the default socket.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use box_client::{BoxClient, ClientError, ClientOptions, Code, ConnectFailure, Endpoint};
use box_transports::EndpointError;

use crate::args::{Cli, Command};
use crate::config;

/// The name of the socket in a state directory.
pub(crate) const SOCKET: &str = "boxd.sock";

/// The default state directory.
pub(crate) fn default_state_dir() -> Result<PathBuf> {
    if let Some(directory) = std::env::var_os("BOXD_SERVER_STATE_DIR") {
        return Ok(directory.into());
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/boxd".into());
    }
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(state) = set("XDG_STATE_HOME") {
        return Ok(Path::new(&state).join("boxd"));
    }
    let home =
        set("HOME").context("neither XDG_STATE_HOME nor HOME is set; set server.state_dir")?;
    Ok(Path::new(&home).join(".local/state/boxd"))
}

/// The endpoint of a server with the same configuration.
///
/// Ignores a configuration that cannot be read, because only the server needs it.
fn default_endpoint(command: &Command) -> Result<String> {
    let file = match command {
        Command::Run(args) => args.options.config.config.clone(),
        Command::Shell(args) => args.options.config.config.clone(),
        Command::Mcp(args) | Command::CodexExec(args) => args.options.config.config.clone(),
        _ => std::env::var_os("BOXD_CONFIG").map(PathBuf::from),
    };
    let read = config::variables()
        .and_then(|variables| config::load(file.as_deref(), variables, Vec::new()));
    let (listen, state) = match read {
        Ok((config, _)) => (config.server.listen, config.server.state_dir),
        Err(_) => (Vec::new(), None),
    };
    let preferred = listen.iter().find(|text| text.starts_with("unix:"));
    if let Some(endpoint) = preferred.or(listen.first()) {
        return Ok(endpoint.clone());
    }
    let state = state.map_or_else(default_state_dir, Ok)?;
    Ok(format!("unix:{}", state.join(SOCKET).display()))
}

/// Connects to the given server, or to the default one if it runs.
pub(crate) async fn server_if_running(cli: &Cli) -> Result<Option<BoxClient>> {
    match server(cli).await {
        Err(error) if cli.endpoint.is_none() && is_absent(&error) => Ok(None),
        connected => connected.map(Some),
    }
}

/// Whether no server listens on a socket.
fn is_absent(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<ConnectError>();
    error.is_some_and(|error| error.is_absent)
}

/// Parses an endpoint. The error names it once.
pub(crate) fn parse_endpoint(text: &str) -> Result<Endpoint> {
    text.parse().map_err(|error: EndpointError| {
        let error = error.to_string();
        let problem = error.strip_prefix("endpoint: ").unwrap_or(&error);
        anyhow!("endpoint {text}: {problem}")
    })
}

/// Connects to the given server, or to the default one.
pub(crate) async fn server(cli: &Cli) -> Result<BoxClient> {
    let (endpoint, explicit) = if let Some(endpoint) = &cli.endpoint {
        (endpoint.clone(), true)
    } else {
        (default_endpoint(&cli.command)?, false)
    };
    let parsed = parse_endpoint(&endpoint)?;
    let mut options = ClientOptions::default();
    if let Some(token) = token(cli.token.as_deref())? {
        let bearer = format!("Bearer {token}");
        options
            .connect
            .headers
            .push(("Authorization".to_owned(), bearer));
        options = options.token(token);
    }
    let connected = BoxClient::connect(parsed.clone(), options).await;
    connected.map_err(|error| ConnectError::new(&endpoint, &parsed, explicit, &error).into())
}

/// A failure to connect to a server.
#[derive(Debug)]
pub(crate) struct ConnectError {
    message: String,
    code: Code,
    /// No program listens on the Unix socket.
    is_absent: bool,
}

impl ConnectError {
    fn new(endpoint: &str, parsed: &Endpoint, explicit: bool, error: &ClientError) -> Self {
        let reason = match error {
            ClientError::NotConnected(ConnectFailure::NotFound) => match parsed {
                Endpoint::Unix { .. } => "no such socket".to_owned(),
                _ => "no such host".to_owned(),
            },
            ClientError::NotConnected(reason) => reason.to_string(),
            error => error.to_string(),
        };
        let hint = match error {
            ClientError::NotConnected(ConnectFailure::HttpStatus(404)) => {
                "check the path; the default is /rpc/ws"
            }
            ClientError::NotConnected(ConnectFailure::HttpStatus(421)) => {
                "use a host name of server.allowed_hosts"
            }
            ClientError::NotConnected(ConnectFailure::HttpStatus(403)) => {
                "use a loopback name or a host name of server.allowed_hosts"
            }
            error if error.code() == Code::Denied => {
                "pass its token with --token FILE or BOXD_TOKEN"
            }
            _ if explicit => "check that the server runs there",
            _ => "start one with `boxd serve`, or choose another with --endpoint",
        };
        Self {
            message: format!("no server at {endpoint}: {reason}; {hint}"),
            code: error.code(),
            is_absent: matches!(parsed, Endpoint::Unix { .. })
                && matches!(
                    error,
                    ClientError::NotConnected(
                        ConnectFailure::NotFound | ConnectFailure::NoListener
                    )
                ),
        }
    }

    pub(crate) fn code(&self) -> Code {
        self.code
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ConnectError {}

/// The token, from a file or the environment.
///
/// It is never an argument, because every user of the machine can see arguments.
fn token(file: Option<&Path>) -> Result<Option<String>> {
    let text = match file {
        Some(path) => std::fs::read_to_string(path).map_err(|error| {
            let problem = match error.kind() {
                ErrorKind::NotFound => "no such file".to_owned(),
                _ => error.to_string(),
            };
            let path = path.display();
            anyhow!("--token {path}: {problem}; pass a file, not the token itself")
        })?,
        None => match std::env::var("BOXD_TOKEN") {
            Ok(text) => text,
            Err(std::env::VarError::NotPresent) => return Ok(None),
            Err(_) => bail!("BOXD_TOKEN: not UTF-8"),
        },
    };
    let token = text.trim();
    if token.is_empty() {
        bail!("token: empty");
    }
    Ok(Some(token.to_owned()))
}
