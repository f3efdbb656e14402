//! Ports inside real boxes, as byte streams.

use std::num::NonZeroU16;
use std::time::Duration;

use box_client::{BoxHandle, PortStream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::support::with_a_box;

/// Echoes its input, and then sends `end`.
const ECHO: &str = "import asyncio
async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b'end')
    writer.close()
async def main():
    server = await asyncio.start_server(echo, '127.0.0.1', 7000)
    await server.serve_forever()
asyncio.run(main())";

const PORT: NonZeroU16 = NonZeroU16::new(7000).unwrap();

async fn connect(work: &BoxHandle) -> PortStream {
    for _ in 0..6000 {
        match work.connect_port(PORT).await {
            Ok(stream) => return stream,
            Err(error) => assert!(error.is_unavailable(), "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no server listens")
}

#[tokio::test]
async fn bytes_flow_in_both_directions_and_each_direction_ends_separately() {
    with_a_box(async |served, work| {
        let refused = work.connect_port(PORT).await.unwrap_err();
        assert!(refused.is_unavailable(), "{refused:?}");
        let server = work
            .program(["python3", "-c", ECHO])
            .cwd("/")
            .start()
            .await
            .unwrap();
        let (mut read, mut write) = tokio::io::split(connect(work).await);
        let sent: Vec<u8> = (0_u32..500_000)
            .map(|n| (n % 253).to_le_bytes()[0])
            .collect();
        let sending = async {
            write.write_all(&sent).await.unwrap();
            write.shutdown().await.unwrap();
            assert!(write.write_all(b"late").await.is_err());
        };
        let mut received = Vec::new();
        let ((), count) = tokio::join!(sending, read.read_to_end(&mut received));
        count.unwrap();
        assert_eq!(received.len(), sent.len() + 3);
        assert_eq!(
            (&received[..sent.len()], &received[sent.len()..]),
            (&sent[..], &b"end"[..])
        );
        // The stream ends with an error when the connection to the server is lost.
        let mut stream = connect(work).await;
        served.server.cut();
        let error = stream.read_to_end(&mut received).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted);
        server.kill().await.unwrap();
    })
    .await;
}
