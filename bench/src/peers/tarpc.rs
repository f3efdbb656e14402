//! tarpc over TCP, with JSON messages.

use anyhow::Result;
use futures::StreamExt;
use tarpc::{
    client, context,
    serde_transport::{self, Transport},
    server::{self, Channel},
    tokio_serde::formats::Json,
    tokio_util::codec::LengthDelimitedCodec,
};
use tokio::net::{TcpListener, TcpStream};

use super::{MAX_IN_FLIGHT, MAX_MESSAGE};
use crate::{contestant, payload::Payload, process};

#[tarpc::service]
trait Service {
    async fn echo(payload: Payload) -> Payload;
}

#[derive(Clone)]
struct Echo;

impl Service for Echo {
    async fn echo(self, _: context::Context, payload: Payload) -> Payload {
        payload
    }
}

pub(crate) async fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    process::announce(listener.local_addr()?)?;
    loop {
        let (stream, _) = listener.accept().await?;
        let config = server::Config {
            pending_response_buffer: MAX_IN_FLIGHT,
        };
        let channel = config.channel(transport(stream)?);
        let answers = channel.execute(Echo.serve()).for_each(|answer| async {
            tokio::spawn(answer);
        });
        tokio::spawn(answers);
    }
}

pub(crate) async fn connect(address: &str) -> Result<Client> {
    let mut config = client::Config::default();
    config.max_in_flight_requests = MAX_IN_FLIGHT;
    config.pending_request_buffer = MAX_IN_FLIGHT;
    let stream = TcpStream::connect(address).await?;
    Ok(Client(
        ServiceClient::new(config, transport(stream)?).spawn(),
    ))
}

type JsonTransport<Incoming, Outgoing> =
    Transport<TcpStream, Incoming, Outgoing, Json<Incoming, Outgoing>>;

fn transport<Incoming, Outgoing>(stream: TcpStream) -> Result<JsonTransport<Incoming, Outgoing>>
where
    Incoming: for<'a> serde::Deserialize<'a>,
    Outgoing: serde::Serialize,
{
    stream.set_nodelay(true)?;
    let framed = LengthDelimitedCodec::builder()
        .max_frame_length(MAX_MESSAGE as usize)
        .new_framed(stream);
    Ok(serde_transport::new(framed, Json::default()))
}

/// The calling end.
#[derive(Clone, Debug)]
pub(crate) struct Client(ServiceClient);

impl contestant::Client for Client {
    async fn echo(&self, payload: Payload) -> Result<Payload> {
        Ok(self.0.echo(context::current(), payload).await?)
    }
}
