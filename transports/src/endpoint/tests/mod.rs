mod listener;
mod parse;
mod tls;
mod unix;

use box_rpc::{ReceiveHalf, SendHalf};

use super::*;

type Halves = (Box<dyn SendHalf>, Box<dyn ReceiveHalf>);

fn endpoint(text: &str) -> Endpoint {
    text.parse().unwrap()
}

/// Sends one message each way over a connection that `listener` accepts.
async fn greet(listener: &mut Listener, options: &ConnectOptions) -> (Halves, Halves, PeerInfo) {
    let local = listener.local_endpoint().clone();
    let (near, accepted) = tokio::join!(local.connect(options), listener.accept());
    let accepted = accepted.unwrap();
    let (mut near, mut far) = (near.unwrap().split(), accepted.connection.split());
    near.0.send("{\"there\":1}".to_owned()).await.unwrap();
    near.0.flush().await.unwrap();
    assert_eq!(
        far.1.receive().await.unwrap().as_deref(),
        Some("{\"there\":1}")
    );
    far.0.send("{\"back\":1}".to_owned()).await.unwrap();
    far.0.flush().await.unwrap();
    assert_eq!(
        near.1.receive().await.unwrap().as_deref(),
        Some("{\"back\":1}")
    );
    (near, far, accepted.peer)
}
