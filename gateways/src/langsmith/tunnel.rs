//! `tunnel`: connections to ports of a box, multiplexed over one websocket by yamux.
//!
//! Each stream begins with a header of the client: a version and a port. The server answers with one byte, and then
//! passes bytes in both directions.

use std::num::NonZeroU16;
use std::time::Duration;

use axum::response::Response;
use box_protocol::{BoxId, Code};
use futures::future::poll_fn;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::compat::{FuturesAsyncReadCompatExt as _, TokioAsyncReadCompatExt as _};
use yamux::{Config, Connection, Mode, Stream};

use crate::http::context::{Context, InBox};
use crate::http::port::PortStream;
use crate::http::socket::{Incoming, Socket, SocketReceiver, SocketSender, Upgrade};

/// The version of the header.
const VERSION: u8 = 1;

/// The answers to a header.
const OK: u8 = 0;
const PORT_REFUSED: u8 = 1;
const NOT_CONNECTED: u8 = 2;
const OTHER_VERSION: u8 = 3;

/// The maximum number of connected streams. The server refuses others one by one.
const MAX_STREAMS: usize = 64;

/// The number of streams at which a tunnel ends: its client opens streams and does not read their refusals.
const TOO_MANY_STREAMS: usize = 4 * MAX_STREAMS;

/// The number of other streams after which yamux has room for no further one.
const LAST_STREAM: usize = TOO_MANY_STREAMS - 1;

/// The memory for what a client sends, in bytes: the smallest window of yamux for each stream.
const WINDOW_BYTES: usize = TOO_MANY_STREAMS * yamux::DEFAULT_CREDIT as usize;

/// The bytes of one message, and of what waits between the websocket and yamux.
const BUFFER_BYTES: usize = 64 * 1024;

/// How long a client may take for the header of a stream.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long one direction of a connection stays open after the other has ended. The SDK then reads no more.
const LAST_BYTES: Duration = Duration::from_secs(10);

/// `GET /tunnel`.
pub(super) async fn upgrade(context: Context, InBox(box_id): InBox, upgrade: Upgrade) -> Response {
    upgrade.serve(context.clone(), |socket| serve(socket, context, box_id))
}

/// Serves a tunnel until the client leaves or the server stops.
async fn serve(socket: Socket, context: Context, box_id: BoxId) {
    let (sender, receiver) = socket.split();
    let (near, far) = duplex(BUFFER_BYTES);
    let (from_streams, to_streams) = tokio::io::split(near);
    tokio::select! {
        () = receive(receiver, to_streams) => {}
        () = send(sender, from_streams) => {}
        () = accept(far, &context, &box_id) => {}
    }
}

/// Passes messages to yamux.
async fn receive(mut receiver: SocketReceiver, mut to: tokio::io::WriteHalf<DuplexStream>) {
    loop {
        let bytes = match receiver.receive().await {
            Incoming::Binary(bytes) => bytes,
            Incoming::Text(_) | Incoming::Left | Incoming::Stopping(_) => return,
        };
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Sends the bytes of yamux.
async fn send(sender: SocketSender, mut from: tokio::io::ReadHalf<DuplexStream>) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if !sender.send_binary(buffer[..count].to_vec()).await {
            return;
        }
    }
}

/// Accepts streams, and connects each to its port.
async fn accept(tunnel: DuplexStream, context: &Context, box_id: &BoxId) {
    let mut config = Config::default();
    // Beyond its own limit, yamux would end all streams.
    config.set_max_num_streams(TOO_MANY_STREAMS);
    config.set_max_connection_receive_window(Some(WINDOW_BYTES));
    let mut connection = Connection::new(tunnel.compat(), config, Mode::Server);
    // The streams end with the tunnel.
    let mut streams = JoinSet::new();
    loop {
        tokio::select! {
            stream = poll_fn(|cx| connection.poll_next_inbound(cx)) => {
                let Some(Ok(stream)) = stream else { return };
                match streams.len() {
                    ..MAX_STREAMS => {
                        streams.spawn(connect(stream, context.clone(), box_id.clone()));
                    }
                    MAX_STREAMS..LAST_STREAM => {
                        streams.spawn(refuse(stream));
                    }
                    _ => return,
                }
            }
            Some(_) = streams.join_next() => {}
        }
    }
}

/// Refuses a stream; the other streams go on.
async fn refuse(stream: Stream) {
    let mut stream = stream.compat();
    if stream.write_all(&[NOT_CONNECTED]).await.is_ok() {
        let _ = stream.shutdown().await;
    }
}

/// Connects one stream to its port.
async fn connect(stream: Stream, context: Context, box_id: BoxId) {
    let mut stream = stream.compat();
    let mut header = [0; 3];
    let read = timeout(HEADER_TIMEOUT, stream.read_exact(&mut header)).await;
    if !matches!(read, Ok(Ok(_))) {
        return;
    }
    let [version, high, low] = header;
    let port = NonZeroU16::new(u16::from_be_bytes([high, low]));
    let opened = match port {
        _ if version != VERSION => Err(OTHER_VERSION),
        None => Err(PORT_REFUSED),
        Some(port) => {
            let opened = PortStream::open(context.runtime(), &context.caller, &box_id, port).await;
            opened.map_err(|error| match error.code() {
                Code::Denied => PORT_REFUSED,
                _ => NOT_CONNECTED,
            })
        }
    };
    let status = opened.as_ref().err().copied().unwrap_or(OK);
    if stream.write_all(&[status]).await.is_err() || stream.flush().await.is_err() {
        return;
    }
    let Ok(mut port) = opened else {
        let _ = stream.shutdown().await;
        return;
    };
    let (mut from_client, mut to_client) = tokio::io::split(stream);
    let (mut from_box, mut to_box) = tokio::io::split(&mut port);
    let inward = async {
        let _ = tokio::io::copy(&mut from_client, &mut to_box).await;
        let _ = to_box.shutdown().await;
    };
    let outward = async {
        let _ = tokio::io::copy(&mut from_box, &mut to_client).await;
        let _ = to_client.shutdown().await;
    };
    tokio::pin!(inward, outward);
    tokio::select! {
        () = &mut outward => { let _ = timeout(LAST_BYTES, inward).await; }
        () = &mut inward => { let _ = timeout(LAST_BYTES, outward).await; }
    }
}
