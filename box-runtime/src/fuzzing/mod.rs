//! Entry points for the fuzzer: what a guest or a proxy may send to the runtime.

mod agent;

use std::net::{Ipv4Addr, Ipv6Addr};

use box_protocol::HostName;
use futures::FutureExt as _;

use crate::egress::dns::{self, Answer, Message, Question};
use crate::egress::{accepts, head_of};

pub use self::agent::agent;

/// Reads a DNS message of a box and answers it in every way.
///
/// # Panics
/// If an answer is not one to the message, is long, or gives an address that the runtime did not
/// choose, or if a name is another one after it is written again.
pub fn dns(message: &[u8]) {
    let question = match dns::parse(message) {
        Message::Ignored => return,
        Message::Refused(reply) => return check_reply(message, &reply),
        Message::Query(question) => question,
    };
    let (v4, v6) = (Ipv4Addr::new(198, 18, 0, 7), Ipv6Addr::LOCALHOST);
    let answers = [
        Answer::At(v4, None),
        Answer::At(v4, Some(v6)),
        Answer::NoSuchName,
        Answer::Failed,
    ];
    for answer in answers {
        let reply = question.response(answer);
        check_reply(message, &reply);
        let records = usize::from(reply[7]);
        assert!(records <= 1);
        let ends = reply.ends_with(&v4.octets()) || reply.ends_with(&v6.octets());
        assert!(records == 0 || ends, "{reply:?}");
    }
    if let Some(name) = &question.name {
        // A dot inside a label would make another name of it.
        assert_eq!(name.as_str().split('.').count(), labels(message), "{name}");
        check_name(name);
    }
}

/// Checks that a reply has the id of the message, is an answer and repeats the question.
fn check_reply(message: &[u8], reply: &[u8]) {
    assert!(reply.len() >= 12 && reply.len() <= message.len() + 28);
    assert_eq!(reply[..2], message[..2], "the id");
    assert!(reply[2] & 0x80 != 0, "no answer");
    assert_eq!(reply[2] & 0x79, message[2] & 0x79, "another operation");
    assert!(matches!(dns::parse(reply), Message::Ignored));
    if reply[5] == 1 {
        // A record has a name of two bytes, ten bytes of numbers and an address.
        let records: &[usize] = if reply[7] == 0 { &[0] } else { &[16, 28] };
        let repeats = |record: &usize| {
            let question = reply.get(12..reply.len() - record);
            question.is_some_and(|question| message[12..].starts_with(question))
        };
        assert!(records.iter().any(repeats), "another question");
    }
}

/// Counts the labels of the question.
fn labels(message: &[u8]) -> usize {
    let (mut at, mut count) = (12, 0);
    while message[at] > 0 {
        at += 1 + usize::from(message[at]);
        count += 1;
    }
    count
}

/// Checks that a name which the runtime has read means the same if a box asks for it.
fn check_name(name: &HostName) {
    let mut message = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.as_str().split('.') {
        message.extend(u8::try_from(label.len()));
        message.extend(label.as_bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    match dns::parse(&message) {
        Message::Query(Question { name: again, .. }) => assert_eq!(again.as_ref(), Some(name)),
        other => panic!("{name}: {other:?}"),
    }
}

/// Reads the answer of a proxy.
///
/// Returns the length of its head and whether it means a connection; `None` if the head is
/// incomplete or too long.
///
/// # Panics
/// If the runtime has read past the head.
pub fn proxy_answer(bytes: &[u8]) -> Option<(usize, bool)> {
    let mut rest = bytes;
    let head = head_of(&mut rest).now_or_never()?.ok()?;
    assert_eq!(head.len() + rest.len(), bytes.len());
    assert!(bytes.starts_with(&head));
    Some((head.len(), accepts(&head)))
}

#[cfg(test)]
mod tests {
    use crate::ShmPool;
    use box_protocol::actions::{AgentChunk, AgentFileChunk, SLOT_BYTES, SLOTS};

    /// Calls `check` with each seed of a fuzz target.
    fn seeds(target: &str, check: impl Fn(&[u8])) {
        let folder = format!("{}/../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let mut count = 0;
        for seed in std::fs::read_dir(folder).unwrap() {
            check(&std::fs::read(seed.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 3, "{count} seeds of {target}");
    }

    #[test]
    fn dns_messages_of_the_fuzzer_get_an_answer_to_their_question() {
        seeds("dns", super::dns);
    }

    #[test]
    fn agent_messages_of_the_fuzzer_give_the_same_output_in_pieces() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(u64::from(SLOTS) * SLOT_BYTES).unwrap();
        let pool = ShmPool::new(file);
        seeds("agent", |seed| {
            super::agent(std::str::from_utf8(seed).unwrap(), &pool);
        });
    }

    #[test]
    fn seeds_with_slots_have_the_current_form() {
        let output = include_str!("../../../fuzz/corpus/agent/in_slot").lines();
        let output = output.skip(1).map(serde_json::from_str::<AgentChunk>);
        let in_slot = output.filter(|chunk| matches!(chunk, Ok(AgentChunk::InSlot(_))));
        assert_eq!(in_slot.count(), 2);
        let file = include_str!("../../../fuzz/corpus/agent/file").lines();
        let file = file.skip(1).map(serde_json::from_str::<AgentFileChunk>);
        let in_slot = file.filter(|chunk| matches!(chunk, Ok(AgentFileChunk::InSlot { .. })));
        assert_eq!(in_slot.count(), 2);
    }

    #[test]
    fn only_a_status_of_two_hundred_and_something_is_a_connection() {
        for (head, accepted) in [
            ("HTTP/1.1 200 Connection established\r\n\r\n", true),
            ("HTTP/1.0 299 \r\nVia: x\r\n\r\n", true),
            ("HTTP/1.1 200\r\n\r\n", true),
            ("HTTP/1.1 2xx Fine\r\n\r\n", false),
            ("HTTP/1.1 407 Authenticate\r\n\r\n", false),
            ("HTTP/1.1 2000 Fine\r\n\r\n", false),
            ("HTTP/1. 200 Fine\r\n\r\n", false),
            ("HTTP/2.0 200 Fine\r\n\r\n", false),
            ("\r\n\r\n", false),
        ] {
            let answer = super::proxy_answer(format!("{head}more").as_bytes());
            assert_eq!(answer, Some((head.len(), accepted)), "{head:?}");
        }
    }
}
