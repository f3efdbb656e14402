//! Name server of a box, over UDP and TCP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use box_protocol::{HostName, NetworkPolicy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use super::rate_limit::RateLimit;
use super::{Shared, dns};

/// Idle timeout of a TCP connection.
const IDLE: Duration = Duration::from_secs(30);

/// Limit of concurrent lookups per box.
const CONCURRENT_LOOKUPS: usize = 32;

/// Serves UDP queries for the lifetime of the box.
pub(super) async fn serve_udp(shared: Arc<Shared>, socket: UdpSocket) {
    let socket = Arc::new(socket);
    let permits = Arc::new(Semaphore::new(CONCURRENT_LOOKUPS));
    let mut rate_limit = RateLimit::new(shared.dialer.config.questions_per_sec);
    let mut message = vec![0; dns::MESSAGE_MAX + 1];
    loop {
        rate_limit.wait().await;
        let Ok((length, from)) = socket.recv_from(&mut message).await else {
            continue;
        };
        let question = match dns::parse(&message[..length]) {
            dns::Message::Ignored => continue,
            dns::Message::Refused(reply) => {
                let _ = socket.send_to(&reply, from).await;
                continue;
            }
            dns::Message::Query(question) => question,
        };
        let current = Arc::clone(&shared.policy.borrow());
        // The client repeats the query if the response is lost or the server is busy.
        if let Some(answer) = shared.answer_known(&question, &current) {
            let _ = socket.send_to(&question.response(answer), from).await;
        } else if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
            let (shared, socket) = (Arc::clone(&shared), Arc::clone(&socket));
            tokio::spawn(async move {
                let answer = shared.look_up_name(&question).await;
                let _ = socket.send_to(&question.response(answer), from).await;
                drop(permit);
            });
        }
    }
}

/// Serves queries on a TCP connection one by one, until it ends or is idle.
pub(super) async fn serve_tcp(shared: &Shared, stream: &mut TcpStream) {
    let mut rate_limit = RateLimit::new(shared.dialer.config.questions_per_sec);
    let mut next = async || {
        rate_limit.wait().await;
        let length = stream.read_u16().await?;
        let mut message = vec![0; usize::from(length).min(dns::MESSAGE_MAX + 1)];
        stream.read_exact(&mut message).await?;
        let reply = match dns::parse(&message) {
            dns::Message::Ignored => return Err(io::ErrorKind::InvalidData.into()),
            dns::Message::Refused(reply) => reply,
            dns::Message::Query(question) => {
                let current = Arc::clone(&shared.policy.borrow());
                let answer = match shared.answer_known(&question, &current) {
                    Some(answer) => answer,
                    None => shared.look_up_name(&question).await,
                };
                question.response(answer)
            }
        };
        let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
        let whole = [&length.to_be_bytes(), reply.as_slice()].concat();
        stream.write_all(&whole).await
    };
    while let Ok(Ok(())) = tokio::time::timeout(IDLE, next()).await {}
}

impl Shared {
    /// Answers a query without a lookup, if possible.
    ///
    /// The server reports forbidden names as nonexistent and answers known names from the table.
    fn answer_known(
        &self,
        question: &dns::Question,
        policy: &Arc<NetworkPolicy>,
    ) -> Option<dns::Answer> {
        let Some(name) = &question.name else {
            return Some(dns::Answer::NoSuchName);
        };
        if let Err(refusal) = self.dialer.policies(policy).check_lookup(name) {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            self.refusals.record(|| name.to_string(), refusal);
            if self.dialer.config.audit {
                let (box_id, why) = (self.id, refusal.as_str());
                tracing::info!(target: "box_egress", %box_id, host = %name, why, "lookup refused");
            }
            return Some(dns::Answer::NoSuchName);
        }
        self.names.known(name).then(|| self.addresses(name))
    }

    /// Looks up whether a name exists.
    ///
    /// The server discards the addresses, because the runtime resolves the name again when it
    /// dials.
    async fn look_up_name(&self, question: &dns::Question) -> dns::Answer {
        let Some(name) = &question.name else {
            return dns::Answer::NoSuchName;
        };
        match self.dialer.exists(&self.permits, name).await {
            Some(true) => self.addresses(name),
            Some(false) => dns::Answer::NoSuchName,
            None => dns::Answer::Failed,
        }
    }

    fn addresses(&self, name: &HostName) -> dns::Answer {
        match self.names.addresses_of(name) {
            Some((v4, v6)) => dns::Answer::At(v4, self.has_v6().then_some(v6)),
            None => dns::Answer::Failed,
        }
    }
}
