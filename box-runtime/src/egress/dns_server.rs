//! Name server of a box, over UDP and TCP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use box_protocol::{HostName, NetworkPolicy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use super::rate_limit::Pace;
use super::{Shared, dns};

/// Idle timeout of a TCP connection.
const IDLE: Duration = Duration::from_secs(30);

/// Limit of concurrent lookups per box.
const LOOKING: usize = 32;

/// Serves UDP queries for the lifetime of the box.
pub(super) async fn messages(shared: Arc<Shared>, exit: UdpSocket) {
    let exit = Arc::new(exit);
    let places = Arc::new(Semaphore::new(LOOKING));
    let mut pace = Pace::new(shared.dialler.config.questions_per_sec);
    let mut message = vec![0; dns::MESSAGE_MAX + 1];
    loop {
        pace.wait().await;
        let Ok((length, from)) = exit.recv_from(&mut message).await else {
            continue;
        };
        let question = match dns::read(&message[..length]) {
            dns::Message::Ignored => continue,
            dns::Message::Refused(reply) => {
                let _ = exit.send_to(&reply, from).await;
                continue;
            }
            dns::Message::Asks(question) => question,
        };
        let current = Arc::clone(&shared.policy.borrow());
        // The client repeats the query if the response is lost or the server is busy.
        if let Some(answer) = shared.find(&question, &current) {
            let _ = exit.send_to(&question.answered(answer), from).await;
        } else if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
            let (shared, exit) = (Arc::clone(&shared), Arc::clone(&exit));
            tokio::spawn(async move {
                let answer = shared.look_for(&question).await;
                let _ = exit.send_to(&question.answered(answer), from).await;
                drop(place);
            });
        }
    }
}

/// Serves queries on a TCP connection one by one, until it ends or is idle.
pub(super) async fn connection(shared: &Shared, stream: &mut TcpStream) {
    let mut pace = Pace::new(shared.dialler.config.questions_per_sec);
    let mut next = async || {
        pace.wait().await;
        let length = stream.read_u16().await?;
        let mut message = vec![0; usize::from(length).min(dns::MESSAGE_MAX + 1)];
        stream.read_exact(&mut message).await?;
        let reply = match dns::read(&message) {
            dns::Message::Ignored => return Err(io::ErrorKind::InvalidData.into()),
            dns::Message::Refused(reply) => reply,
            dns::Message::Asks(question) => {
                let current = Arc::clone(&shared.policy.borrow());
                let answer = match shared.find(&question, &current) {
                    Some(answer) => answer,
                    None => shared.look_for(&question).await,
                };
                question.answered(answer)
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
    fn find(&self, question: &dns::Question, policy: &Arc<NetworkPolicy>) -> Option<dns::Answer> {
        let Some(name) = &question.name else {
            return Some(dns::Answer::Nobody);
        };
        if let Err(refusal) = self.dialler.policies(policy).may_ask(name) {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            self.refusals.tell(|| name.to_string(), refusal);
            if self.dialler.config.audit {
                let (box_id, why) = (self.id, refusal.as_str());
                tracing::info!(target: "box_egress", %box_id, host = %name, why, "not looked for");
            }
            return Some(dns::Answer::Nobody);
        }
        self.names.known(name).then(|| self.told(name))
    }

    /// Looks up whether a name exists.
    ///
    /// The server discards the addresses, because the runtime resolves the name again when it
    /// dials.
    async fn look_for(&self, question: &dns::Question) -> dns::Answer {
        let Some(name) = &question.name else {
            return dns::Answer::Nobody;
        };
        match self.dialler.exists(&self.asker, name).await {
            Some(true) => self.told(name),
            Some(false) => dns::Answer::Nobody,
            None => dns::Answer::Failed,
        }
    }

    fn told(&self, name: &HostName) -> dns::Answer {
        match self.names.addresses_of(name) {
            Some((v4, v6)) => dns::Answer::At(v4, self.has_v6().then_some(v6)),
            None => dns::Answer::Failed,
        }
    }
}
