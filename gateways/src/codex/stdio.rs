//! The parent process as the client, over standard input and output.

use std::io;
use std::sync::Arc;

use box_client::BoxClient;
use box_protocol::{BoxError, BoxId, SpecDraft};
use box_rpc::Caller;
use box_runtime::BoxRuntime;
use box_service::BoxService;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};

use super::connection::Connection;
use super::session::{Place, Sessions};
use super::{GATEWAY, MAX_MESSAGE_BYTES};
use crate::target::{DefaultBox, InProcess, Target};

/// Serves the parent process until it closes the input. Its first request creates the box with this spec.
pub async fn serve_stdio(
    policy: BoxService,
    runtime: BoxRuntime,
    default: BoxId,
    spec: SpecDraft,
) -> Result<(), BoxError> {
    let target = Target::InProcess(InProcess {
        policy,
        runtime,
        caller: Caller::Local,
        gateway: GATEWAY,
    });
    serve(target, default, spec).await
}

/// Serves the parent process with a box of a server. Its first request creates the box if the server does not have it.
pub async fn serve_stdio_for(
    client: BoxClient,
    default: BoxId,
    spec: SpecDraft,
) -> Result<(), BoxError> {
    serve(Target::Server(client), default, spec).await
}

async fn serve(target: Target, id: BoxId, spec: SpecDraft) -> Result<(), BoxError> {
    let place = Place {
        target,
        default: DefaultBox {
            id,
            spec: Some(Box::new(spec)),
        },
        owner: String::new(),
    };
    let failed = |error: io::Error| BoxError::internal(format!("codex: {error}"));
    let (mut connection, mut messages) = Connection::new(Arc::<Sessions>::default(), place);
    let write = async {
        let mut output = tokio::io::stdout();
        while let Some(mut message) = messages.recv().await {
            message.push('\n');
            output.write_all(message.as_bytes()).await?;
            output.flush().await?;
        }
        io::Result::Ok(())
    };
    let read = async move {
        let mut input = tokio::io::BufReader::new(tokio::io::stdin());
        let mut line = Vec::new();
        while next_line(&mut input, &mut line).await? {
            let text = String::from_utf8_lossy(&line);
            if !text.trim().is_empty() {
                connection.receive(&text).await;
            }
        }
        io::Result::Ok(())
    };
    tokio::select! {
        read = read => read,
        written = write => written,
    }
    .map_err(failed)
}

/// Reads a line; returns `false` at the end of the input.
async fn next_line(
    input: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> io::Result<bool> {
    line.clear();
    let limit = MAX_MESSAGE_BYTES as u64 + 1;
    let read = input.take(limit).read_until(b'\n', line).await?;
    if line.len() > MAX_MESSAGE_BYTES {
        let rule = format!("a message of more than {MAX_MESSAGE_BYTES} bytes; send a shorter one");
        return Err(io::Error::other(rule));
    }
    Ok(read > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_that_never_ends_needs_bounded_memory() {
        let mut line = Vec::new();
        let mut input = tokio::io::BufReader::new(&b"one\ntwo"[..]);
        assert!(next_line(&mut input, &mut line).await.unwrap());
        assert!(next_line(&mut input, &mut line).await.unwrap());
        assert_eq!(line, b"two");
        assert!(!next_line(&mut input, &mut line).await.unwrap());
        let mut endless = tokio::io::BufReader::new(tokio::io::repeat(b'x'));
        assert!(next_line(&mut endless, &mut line).await.is_err());
        assert_eq!(line.len(), MAX_MESSAGE_BYTES + 1);
    }
}
