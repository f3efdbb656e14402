//! The name server of a box: questions in, answers out, over both of the ways there are.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use box_protocol::{HostName, NetworkPolicy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

use super::pace::Pace;
use super::{Current, Shared, dns};

/// How long a connection with questions may say nothing.
const IDLE: Duration = Duration::from_secs(30);

/// Answers what comes as single messages, for as long as the box lives.
pub(super) async fn messages(shared: Arc<Shared>, exit: UdpSocket, policy: Current) {
    let mut pace = Pace::new(shared.dialler.config.questions_per_sec);
    let mut message = vec![0; dns::MESSAGE_MAX + 1];
    loop {
        pace.wait().await;
        let Ok((length, from)) = exit.recv_from(&mut message).await else {
            continue;
        };
        let current = Arc::clone(&policy.borrow());
        if let Some(reply) = shared.answer(&message[..length], &current) {
            // Whoever asked asks again.
            let _ = exit.send_to(&reply, from).await;
        }
    }
}

/// Answers what comes over a connection, one question after the other, until it ends or says nothing for long.
pub(super) async fn connection(shared: &Shared, stream: &mut TcpStream, policy: &Current) {
    let mut pace = Pace::new(shared.dialler.config.questions_per_sec);
    let mut next = async || {
        pace.wait().await;
        let length = stream.read_u16().await?;
        let mut message = vec![0; usize::from(length).min(dns::MESSAGE_MAX + 1)];
        stream.read_exact(&mut message).await?;
        let current = Arc::clone(&policy.borrow());
        let reply = shared.answer(&message, &current);
        let reply = reply.ok_or(io::ErrorKind::InvalidData)?;
        let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
        let whole = [&length.to_be_bytes(), reply.as_slice()].concat();
        stream.write_all(&whole).await
    };
    while let Ok(Ok(())) = tokio::time::timeout(IDLE, next()).await {}
}

impl Shared {
    fn answer(&self, message: &[u8], policy: &NetworkPolicy) -> Option<Vec<u8>> {
        dns::answer(message, |name| self.find(name, policy))
    }

    fn find(&self, name: &HostName, policy: &NetworkPolicy) -> dns::Answer {
        if let Err(refusal) = self.policies(policy).may_ask(name) {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            if self.dialler.config.audit {
                let (box_id, why) = (self.id, refusal.as_str());
                tracing::info!(target: "box_egress", %box_id, host = %name, why, "not looked for");
            }
            return dns::Answer::Nobody;
        }
        match self.names.addresses_of(name) {
            Some((v4, v6)) => dns::Answer::At(v4, self.has_v6.then_some(v6)),
            None => dns::Answer::Failed,
        }
    }
}
