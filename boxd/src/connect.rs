//! Connects to a server: the given endpoint, or the default socket.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use box_client::{BoxClient, ClientError, ClientOptions, Code, ConnectFailure, Endpoint};

use crate::args::{Arguments, Command};
use crate::config;

/// The name of the socket in a state directory.
pub(crate) const SOCKET: &str = "boxd.sock";

/// The default state directory.
pub(crate) fn usual_state_dir() -> Result<PathBuf> {
    if let Some(said) = std::env::var_os("BOXD_SERVER_STATE_DIR") {
        return Ok(said.into());
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
fn usual_endpoint(command: &Command) -> Result<String> {
    let file = match command {
        Command::Run(asked) => asked.options.config.config.clone(),
        Command::Shell(asked) => asked.options.config.config.clone(),
        _ => std::env::var_os("BOXD_CONFIG").map(PathBuf::from),
    };
    let read = config::variables().and_then(|said| config::load(file.as_deref(), said, Vec::new()));
    let (listen, state) = match read {
        Ok((config, _)) => (config.server.listen, config.server.state_dir),
        Err(_) => (Vec::new(), None),
    };
    let nearest = listen.iter().find(|text| text.starts_with("unix:"));
    if let Some(endpoint) = nearest.or(listen.first()) {
        return Ok(endpoint.clone());
    }
    let state = state.map_or_else(usual_state_dir, Ok)?;
    Ok(format!("unix:{}", state.join(SOCKET).display()))
}

/// Connects to the given server, or to the default one.
pub(crate) async fn server(arguments: &Arguments) -> Result<BoxClient> {
    let (endpoint, named) = if let Some(endpoint) = &arguments.endpoint {
        (endpoint.clone(), true)
    } else {
        (usual_endpoint(&arguments.command)?, false)
    };
    let parsed: Endpoint = endpoint
        .parse()
        .with_context(|| format!("endpoint {endpoint}"))?;
    let mut options = ClientOptions::default();
    if let Some(token) = token(arguments.token.as_deref())? {
        let bearer = format!("Bearer {token}");
        options
            .connect
            .headers
            .push(("Authorization".to_owned(), bearer));
        options = options.token(token);
    }
    let connected = BoxClient::connect(parsed.clone(), options).await;
    connected.map_err(|error| NoServer::new(&endpoint, &parsed, named, &error).into())
}

/// A failure to connect to a server.
#[derive(Debug)]
pub(crate) struct NoServer {
    message: String,
    code: Code,
}

impl NoServer {
    fn new(endpoint: &str, parsed: &Endpoint, named: bool, error: &ClientError) -> Self {
        let why = match error {
            ClientError::NotConnected(ConnectFailure::NotFound) => match parsed {
                Endpoint::Unix { .. } => "no such socket".to_owned(),
                _ => "no such host".to_owned(),
            },
            ClientError::NotConnected(why) => why.to_string(),
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
            _ if named => "check that the server runs there",
            _ => "start one with `boxd serve`, or choose another with --endpoint",
        };
        Self {
            message: format!("no server at {endpoint}: {why}; {hint}"),
            code: error.code(),
        }
    }

    pub(crate) fn code(&self) -> Code {
        self.code
    }
}

impl fmt::Display for NoServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for NoServer {}

/// The token, from a file or the environment.
///
/// It is never an argument, because every user of the machine can see arguments.
fn token(file: Option<&Path>) -> Result<Option<String>> {
    let text = match file {
        Some(path) => std::fs::read_to_string(path).with_context(|| {
            let path = path.display();
            format!("cannot read {path}; --token takes a file, not the token itself")
        })?,
        None => match std::env::var("BOXD_TOKEN") {
            Ok(text) => text,
            Err(std::env::VarError::NotPresent) => return Ok(None),
            Err(_) => bail!("BOXD_TOKEN is not UTF-8"),
        },
    };
    let token = text.trim();
    if token.is_empty() {
        bail!("token: empty");
    }
    Ok(Some(token.to_owned()))
}
