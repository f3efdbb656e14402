//! The way to a server: the one that was named, or the usual one if it is there.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use box_client::{BoxClient, ClientError, ClientOptions, Code, Endpoint};
use box_rpc::CallError;

use crate::args::Arguments;

/// The socket's name in a state directory.
pub(crate) const SOCKET: &str = "boxd.sock";

/// Where a server keeps its boxes unless a file or a flag says otherwise.
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
        set("HOME").context("neither XDG_STATE_HOME nor HOME is set; name a state directory")?;
    Ok(Path::new(&home).join(".local/state/boxd"))
}

/// Connects to the server that was named, or to the usual one.
pub(crate) async fn server(arguments: &Arguments) -> Result<BoxClient> {
    let (endpoint, named) = if let Some(endpoint) = &arguments.endpoint {
        (endpoint.clone(), true)
    } else {
        let socket = usual_state_dir()?.join(SOCKET);
        (format!("unix:{}", socket.display()), false)
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
    BoxClient::connect(parsed, options).await.map_err(|error| {
        let hint = if error.code() == Code::Denied {
            "give its token by --token FILE or BOXD_TOKEN"
        } else if named {
            "is it running there?"
        } else {
            "start one with `boxd serve`, or name another with --endpoint"
        };
        let why = match &error {
            // What the system said; that nothing was sent need not be.
            ClientError::Failed(CallError::NotSent(why)) => match why.as_str() {
                "connection: entity not found" => "there is no such socket",
                "connection: connection refused" => "nobody listens there",
                why => why.trim_start_matches("connection: "),
            }
            .to_owned(),
            error => error.to_string(),
        };
        anyhow!("no server at {endpoint}: {why}; {hint}")
    })
}

/// The token, from a file or the environment: arguments can be seen by everybody on the machine.
fn token(file: Option<&Path>) -> Result<Option<String>> {
    let text = match file {
        Some(path) => std::fs::read_to_string(path).with_context(|| {
            let path = path.display();
            format!("cannot read {path}; --token names a file, never the token itself")
        })?,
        None => match std::env::var("BOXD_TOKEN") {
            Ok(text) => text,
            Err(std::env::VarError::NotPresent) => return Ok(None),
            Err(_) => bail!("BOXD_TOKEN is not UTF-8"),
        },
    };
    let token = text.trim();
    if token.is_empty() {
        bail!("the token is empty");
    }
    Ok(Some(token.to_owned()))
}
