//! The name server of a box: questions in, answers out, over both of the ways there are.

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

/// How long a connection with questions may say nothing.
const IDLE: Duration = Duration::from_secs(30);

/// Names of one box that are looked for at once.
const LOOKING: usize = 32;

/// Answers what comes as single messages, for as long as the box lives.
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
        // Whoever asked asks again, if the answer is lost or nobody has time.
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

/// Answers what comes over a connection, one question after the other, until it ends or says nothing for long.
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
    /// What can be answered at once: nobody who may not be looked for is, and who was found before is there.
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

    /// Whether there is anybody of a name. What was found is forgotten: it is looked for again when it is dialled.
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
