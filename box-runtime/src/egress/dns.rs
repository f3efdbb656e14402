//! Parser and encoder of DNS messages.
//!
//! The parser is pure and strict. It accepts one question per message with an uncompressed name.
//! Any other message gets an error response or none.

use std::net::{Ipv4Addr, Ipv6Addr};

use box_protocol::HostName;

/// Length of a message header.
const HEADER: usize = 12;
/// Longest accepted message.
///
/// This covers the header, a name, a type and a class, and the options that clients append.
pub(crate) const MESSAGE_MAX: usize = 4096;

/// Time to live of an answer, in seconds.
///
/// The address stays valid for the lifetime of the box. A later policy change is enforced when the
/// box connects.
const TTL_SECONDS: u32 = 60;

/// Compression pointer to the name after the header.
const NAME_POINTER: [u8; 2] = [0xc0, 12];

const INTERNET: u16 = 1;
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;

/// Result of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The addresses of the name.
    At(Ipv4Addr, Option<Ipv6Addr>),
    /// The name does not exist.
    NoSuchName,
    /// The lookup failed temporarily.
    Failed,
}

/// DNS response codes.
#[derive(Debug, Clone, Copy)]
enum ResponseCode {
    NoError = 0,
    FormatError = 1,
    Failed = 2,
    NoSuchName = 3,
    NotImplemented = 4,
}

/// Parsed message from a box.
#[derive(Debug)]
pub(crate) enum Message {
    /// The message gets no response.
    Ignored,
    /// The message gets this error response.
    Refused(Vec<u8>),
    /// The message is a valid question.
    Query(Question),
}

/// Question about a name.
#[derive(Debug)]
pub(crate) struct Question {
    /// Name in the question, if it is a valid host name.
    pub(crate) name: Option<HostName>,
    header: [u8; HEADER],
    /// Raw bytes of the question, which the response repeats.
    bytes: Vec<u8>,
    kind: u16,
}

/// Parses a message.
pub(crate) fn parse(message: &[u8]) -> Message {
    let Some(header) = message.first_chunk::<HEADER>() else {
        return Message::Ignored;
    };
    let is_answer = header[2] & 0x80 != 0;
    if is_answer || message.len() > MESSAGE_MAX {
        return Message::Ignored;
    }
    let is_plain_question = header[2] & 0x78 == 0;
    if !is_plain_question {
        return Message::Refused(reply(header, &[], ResponseCode::NotImplemented, &[]));
    }
    let is_one = header[4..6] == [0, 1];
    match is_one.then(|| Question::parse(*header, message)).flatten() {
        Some(question) => Message::Query(question),
        None => Message::Refused(reply(header, &[], ResponseCode::FormatError, &[])),
    }
}

impl Question {
    fn parse(header: [u8; HEADER], message: &[u8]) -> Option<Self> {
        let mut at = HEADER;
        let mut text: Vec<u8> = Vec::new();
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            match length {
                0 => break,
                // A label has at most 63 bytes; the upper two bits mark a compression pointer.
                64.. => return None,
                _ => {}
            }
            let label = message.get(at..at + length)?;
            at += length;
            if !text.is_empty() {
                text.push(b'.');
            }
            // A dot inside a label would look like a separator.
            text.extend(
                label
                    .iter()
                    .map(|byte| if *byte == b'.' { 0 } else { *byte }),
            );
            if text.len() > 255 {
                return None;
            }
        }
        let rest = message.get(at..at + 4)?;
        let (kind, class) = ([rest[0], rest[1]], [rest[2], rest[3]]);
        let text = std::str::from_utf8(&text).ok();
        let text = text.filter(|_| u16::from_be_bytes(class) == INTERNET);
        Some(Self {
            name: text.and_then(|text| HostName::new(text).ok()),
            header,
            bytes: message[HEADER..at + 4].to_vec(),
            kind: u16::from_be_bytes(kind),
        })
    }

    /// Encodes the response to this question.
    pub(crate) fn response(&self, answer: Answer) -> Vec<u8> {
        let (code, address) = match (answer, self.kind) {
            (Answer::At(v4, _), TYPE_A) => (ResponseCode::NoError, v4.octets().to_vec()),
            (Answer::At(_, Some(v6)), TYPE_AAAA) => (ResponseCode::NoError, v6.octets().to_vec()),
            (Answer::At(..), _) => (ResponseCode::NoError, Vec::new()),
            (Answer::NoSuchName, _) => (ResponseCode::NoSuchName, Vec::new()),
            (Answer::Failed, _) => (ResponseCode::Failed, Vec::new()),
        };
        let mut record = Vec::new();
        if let Ok(length) = u16::try_from(address.len())
            && length > 0
        {
            record.extend(NAME_POINTER);
            record.extend(self.kind.to_be_bytes());
            record.extend(INTERNET.to_be_bytes());
            record.extend(TTL_SECONDS.to_be_bytes());
            record.extend(length.to_be_bytes());
            record.extend(address);
        }
        reply(&self.header, &self.bytes, code, &record)
    }
}

fn reply(header: &[u8], question: &[u8], code: ResponseCode, record: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + question.len() + record.len());
    message.extend(&header[..2]);
    // Flags: response, recursion desired as in the query, recursion available.
    message.extend([0x80 | (header[2] & 0x79), 0x80 | code as u8]);
    message.extend([
        0,
        u8::from(!question.is_empty()),
        0,
        u8::from(!record.is_empty()),
    ]);
    message.extend([0; 4]);
    message.extend(question);
    message.extend(record);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ask(labels: &[&[u8]], kind: u16) -> Vec<u8> {
        let mut message = vec![7, 8, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in labels {
            message.push(u8::try_from(label.len()).unwrap());
            message.extend(*label);
        }
        message.push(0);
        message.extend(kind.to_be_bytes());
        message.extend(INTERNET.to_be_bytes());
        message
    }

    fn answer(message: &[u8], find: impl FnOnce(&HostName) -> Answer) -> Option<Vec<u8>> {
        match parse(message) {
            Message::Ignored => None,
            Message::Refused(reply) => Some(reply),
            Message::Query(question) => {
                let answer = question.name.as_ref().map_or(Answer::NoSuchName, find);
                Some(question.response(answer))
            }
        }
    }

    fn respond(message: &[u8]) -> (Vec<u8>, Option<String>) {
        let mut looked_up = None;
        let answer = answer(message, |name| {
            looked_up = Some(name.to_string());
            Answer::At(
                Ipv4Addr::new(198, 18, 1, 0),
                Some("fd00:b0:0:1::".parse().unwrap()),
            )
        });
        (answer.unwrap(), looked_up)
    }

    #[test]
    fn a_name_is_answered_with_its_address() {
        let question = ask(&[b"Ok", b"COM"], TYPE_A);
        let (answer, looked_up) = respond(&question);
        assert_eq!(looked_up.as_deref(), Some("ok.com"));
        assert_eq!(answer[..4], [7, 8, 0x81, 0x80]);
        assert_eq!(answer[4..8], [0, 1, 0, 1]);
        assert!(
            answer
                .windows(question.len() - HEADER)
                .any(|part| part == &question[HEADER..]),
            "as it was written"
        );
        assert!(answer.ends_with(&[0, 4, 198, 18, 1, 0]));
        let (answer, _) = respond(&ask(&[b"ok", b"com"], TYPE_AAAA));
        assert!(answer.ends_with(&[0, 1]) || answer.ends_with(&[0; 8]));
        let (answer, _) = respond(&ask(&[b"ok", b"com"], 15));
        assert_eq!(
            (answer[3], answer[7]),
            (0x80, 0),
            "there is one, and nothing of that type"
        );
    }

    #[test]
    fn invalid_names_do_not_exist_and_are_not_looked_up() {
        for labels in [
            &[b"evil\0".as_slice(), b"ok", b"com"][..],
            &[b"ok.com", b"evil"],
            &[b"1", b"2", b"3", b"4"],
            &[b"2130706433"],
            &[b"\xd0\xbe\xd0\xba", b"com"],
            &[],
        ] {
            let (answer, looked_up) = respond(&ask(labels, TYPE_A));
            assert_eq!(looked_up, None, "{labels:?}");
            assert_eq!((answer[3] & 15, answer[7]), (3, 0), "{labels:?}");
        }
    }

    #[test]
    fn invalid_messages_get_an_error_or_no_response() {
        let good = ask(&[b"ok", b"com"], TYPE_A);
        let changed = |at: usize, byte: u8| {
            let mut message = good.clone();
            message[at] = byte;
            answer(&message, |_| Answer::NoSuchName)
        };
        assert!(changed(2, 0x81).is_none(), "an answer");
        assert_eq!(changed(2, 0x29).unwrap()[3] & 15, 4, "an update");
        assert_eq!(changed(5, 2).unwrap()[3] & 15, 1, "two questions");
        assert_eq!(changed(HEADER, 0xc0).unwrap()[3] & 15, 1, "a pointer");
        assert!(answer(&good[..11], |_| Answer::NoSuchName).is_none());
        assert_eq!(
            answer(&good[..good.len() - 1], |_| Answer::NoSuchName).unwrap()[3] & 15,
            1
        );
        assert!(answer(&vec![0; MESSAGE_MAX + 1], |_| Answer::NoSuchName).is_none());
    }

    proptest! {
        #[test]
        fn any_message_gets_a_short_response_without_a_panic(message in prop::collection::vec(any::<u8>(), 0..600)) {
            if let Some(reply) = answer(&message, |_| Answer::At(Ipv4Addr::LOCALHOST, None)) {
                prop_assert!(reply.len() <= message.len() + 16);
                prop_assert_eq!(&reply[..2], &message[..2]);
            }
        }
    }
}
