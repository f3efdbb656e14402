//! Connecting to an endpoint.

use std::io::{Error, ErrorKind};

use box_rpc::{Connection, ConnectionError};
use tokio::process::Command;

use super::{ConnectOptions, Endpoint, HostPort};
use crate::{queue, stdio, tcp, unix, websocket::WebSocket};

impl Endpoint {
    /// Connects, within the timeout of `options`.
    pub async fn connect(
        &self,
        options: &ConnectOptions,
    ) -> Result<Box<dyn Connection>, ConnectionError> {
        match tokio::time::timeout(options.timeout, self.open(options)).await {
            Ok(outcome) => outcome,
            Err(_) => {
                Err(Error::new(ErrorKind::TimedOut, "no connection within the timeout").into())
            }
        }
    }

    async fn open(&self, options: &ConnectOptions) -> Result<Box<dyn Connection>, ConnectionError> {
        let limits = &options.limits;
        Ok(match self {
            Self::Queue { name } => Box::new(queue::connect(name)?),
            Self::Stdio { command } => {
                let (program, arguments) = command.split_first().ok_or_else(|| {
                    Error::new(
                        ErrorKind::InvalidInput,
                        "stdio: no command; connecting needs one",
                    )
                })?;
                let mut command = Command::new(program);
                command.args(arguments);
                Box::new(stdio::spawn(command, limits)?)
            }
            Self::Tcp {
                address,
                tls: false,
            } => Box::new(tcp::connect(address.parts(), limits).await?),
            Self::Tcp { address, tls: true } => {
                tcp::connect_tls(&address.host, address.port, &options.tls, limits).await?
            }
            Self::Unix { path } => Box::new(unix::connect(path, limits).await?),
            Self::WebSocket { address, tls, path } => {
                open_web_socket(address, *tls, path, options).await?
            }
        })
    }
}

impl HostPort {
    fn parts(&self) -> (&str, u16) {
        (&self.host, self.port)
    }
}

async fn open_web_socket(
    address: &HostPort,
    tls: bool,
    path: &str,
    options: &ConnectOptions,
) -> Result<Box<dyn Connection>, ConnectionError> {
    let ConnectOptions {
        limits, headers, ..
    } = options;
    let path = if path.is_empty() { "/" } else { path };
    let host = address.to_string();
    let default_port = if tls { ":443" } else { ":80" };
    let host = host.strip_suffix(default_port).unwrap_or(&host);
    let stream = tcp::open(address.parts()).await?;
    if tls {
        let stream = options.tls.connect(stream, &address.host).await?;
        let (read, write) = tokio::io::split(stream);
        let socket = WebSocket::request(read, write, limits, host, path, headers).await?;
        return Ok(Box::new(socket));
    }
    let (read, write) = stream.into_split();
    let socket = WebSocket::request(read, write, limits, host, path, headers).await?;
    Ok(Box::new(socket))
}
