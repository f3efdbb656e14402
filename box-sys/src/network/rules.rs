//! The packet filter rules of a network with egress.
//!
//! ```text
//! table inet box { chain out { type nat hook output priority dstnat; policy drop;
//!   meta l4proto udp th dport 53 redirect to :53
//!   meta l4proto tcp th dport 53 redirect to :1
//!   meta nfproto ipv4 ip daddr 127.0.0.0/8 accept          addresses of the box
//!   meta nfproto ipv4 ip daddr 198.18.0.1 accept
//!   meta nfproto ipv6 ip6 daddr ::1 accept
//!   meta nfproto ipv6 ip6 daddr fd00:b0::1 accept
//!   tcp flags & (syn|ack) == syn meta mark 0 queue to 0    these four: with a SYN queue
//!   meta l4proto tcp meta mark 1 reject with tcp reset
//!   meta l4proto tcp meta mark 2 reject with icmpx host-unreachable
//!   meta l4proto tcp meta mark 3 reject with icmpx no-route
//!   meta l4proto tcp redirect to :1 } }
//! ```
//!
//! A chain of this type sees only the first packet of each connection, so later packets cost
//! nothing. A queued packet returns with a mark and passes the chain again. A packet of an
//! established connection that the kernel has forgotten also counts as a first packet. It passes to
//! the egress socket, which has the connection.
//!
//! The kernel drops all other packets, such as other UDP and ICMP, and the sender gets EPERM. They
//! would reach no destination without the rule either, because the only interface is loopback.

use std::io;
use std::net::Ipv6Addr;

use super::netlink::{Batch, Bytes, Family};
use super::{DNS_PORT, OWN_V4, OWN_V6, TCP_PORT, syn_queue};

/// Attribute numbers of `linux/netfilter/nf_tables.h`, which libc does not define.
mod nfta {
    pub(super) const TABLE_NAME: u16 = 1;
    pub(super) const CHAIN_TABLE: u16 = 1;
    pub(super) const CHAIN_NAME: u16 = 3;
    pub(super) const CHAIN_HOOK: u16 = 4;
    pub(super) const CHAIN_POLICY: u16 = 5;
    pub(super) const CHAIN_TYPE: u16 = 7;
    pub(super) const HOOK_HOOKNUM: u16 = 1;
    pub(super) const HOOK_PRIORITY: u16 = 2;
    pub(super) const RULE_TABLE: u16 = 1;
    pub(super) const RULE_CHAIN: u16 = 2;
    pub(super) const RULE_EXPRESSIONS: u16 = 4;
    pub(super) const LIST_ELEM: u16 = 1;
    pub(super) const EXPR_NAME: u16 = 1;
    pub(super) const EXPR_DATA: u16 = 2;
    pub(super) const CMP_SREG: u16 = 1;
    pub(super) const CMP_OP: u16 = 2;
    pub(super) const CMP_DATA: u16 = 3;
    pub(super) const PAYLOAD_DREG: u16 = 1;
    pub(super) const PAYLOAD_BASE: u16 = 2;
    pub(super) const PAYLOAD_OFFSET: u16 = 3;
    pub(super) const PAYLOAD_LEN: u16 = 4;
    pub(super) const META_DREG: u16 = 1;
    pub(super) const META_KEY: u16 = 2;
    pub(super) const IMMEDIATE_DREG: u16 = 1;
    pub(super) const IMMEDIATE_DATA: u16 = 2;
    pub(super) const DATA_VALUE: u16 = 1;
    pub(super) const DATA_VERDICT: u16 = 2;
    pub(super) const VERDICT_CODE: u16 = 1;
    pub(super) const REDIR_REG_PROTO_MIN: u16 = 1;
    pub(super) const BITWISE_SREG: u16 = 1;
    pub(super) const BITWISE_DREG: u16 = 2;
    pub(super) const BITWISE_LEN: u16 = 3;
    pub(super) const BITWISE_MASK: u16 = 4;
    pub(super) const BITWISE_XOR: u16 = 5;
    pub(super) const QUEUE_NUM: u16 = 1;
    pub(super) const QUEUE_TOTAL: u16 = 2;
    pub(super) const TARGET_NAME: u16 = 1;
    pub(super) const TARGET_REV: u16 = 2;
    pub(super) const TARGET_INFO: u16 = 3;
    pub(super) const REJECT_TYPE: u16 = 1;
    pub(super) const REJECT_ICMP_CODE: u16 = 2;
}

const TABLE: &str = "box";
const CHAIN: &str = "out";
/// Before all other chains that evaluate destinations.
const PRIORITY: libc::c_int = libc::NF_IP_PRI_NAT_DST;

/// Action of a rule.
#[derive(Debug, Clone, Copy)]
enum Action {
    Accept,
    /// Redirect to this port of the loopback address.
    Redirect(u16),
    /// Hold the packet until the reader of the SYN queue has decided.
    Queue(QueueMethod),
    /// Reject with this type and code.
    Reject(u32, Option<u8>),
}

/// How the kernel queues packets. Most kernels support both ways, some only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueMethod {
    /// With the `queue` expression.
    Expression,
    /// With the `NFQUEUE` target of the older filter.
    Target,
}

/// Offset of the TCP flags, and two of them.
const FLAGS: u32 = 13;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// `NFT_REJECT_TCP_RST`.
const RESET: u32 = 1;
/// `NFT_REJECT_ICMPX_UNREACH`, with its codes for networks and hosts.
const UNREACHABLE: u32 = 2;
const NO_ROUTE: u8 = 0;
const NO_HOST: u8 = 2;

/// Condition of a rule.
#[derive(Debug, Clone, Copy)]
enum Match {
    /// This protocol, and this destination port if given.
    Transport(libc::c_int, Option<u16>),
    /// A TCP SYN without a mark.
    Opening,
    /// TCP with this mark.
    Marked(u32),
    /// This address family, with a destination that starts with these bytes.
    Address(libc::c_int, &'static [u8]),
}

/// Writes the rules into this network namespace, with a SYN queue if given.
pub(super) fn write(syn_queue: Option<QueueMethod>) -> io::Result<()> {
    const ADDRESSES: [(libc::c_int, &[u8]); 4] = [
        (libc::NFPROTO_IPV4, &[127]),
        (libc::NFPROTO_IPV4, &OWN_V4.octets()),
        (libc::NFPROTO_IPV6, &Ipv6Addr::LOCALHOST.octets()),
        (libc::NFPROTO_IPV6, &OWN_V6.octets()),
    ];
    let (tcp, udp) = (libc::IPPROTO_TCP, libc::IPPROTO_UDP);
    let to = |protocol, port| Match::Transport(protocol, port);
    let dns = [
        (to(udp, Some(DNS_PORT)), Action::Redirect(DNS_PORT)),
        (to(tcp, Some(DNS_PORT)), Action::Redirect(TCP_PORT)),
    ];
    let own = ADDRESSES.map(|(family, begins)| (Match::Address(family, begins), Action::Accept));
    let queueing = syn_queue.map(|method| {
        [
            (Match::Opening, Action::Queue(method)),
            (
                Match::Marked(syn_queue::REFUSED),
                Action::Reject(RESET, None),
            ),
            (
                Match::Marked(syn_queue::HOST_UNREACHABLE),
                Action::Reject(UNREACHABLE, Some(NO_HOST)),
            ),
            (
                Match::Marked(syn_queue::NETWORK_UNREACHABLE),
                Action::Reject(UNREACHABLE, Some(NO_ROUTE)),
            ),
        ]
    });
    let rest = [(to(tcp, None), Action::Redirect(TCP_PORT))];
    let rules = dns.into_iter().chain(own);
    let rules = rules.chain(queueing.into_iter().flatten()).chain(rest);
    let mut batch = Batch::default();
    batch.control(libc::NFNL_MSG_BATCH_BEGIN as u16, batch_header);
    batch.request(message(libc::NFT_MSG_NEWTABLE), |body| {
        family(body);
        body.name(nfta::TABLE_NAME, TABLE);
    });
    batch.request(message(libc::NFT_MSG_NEWCHAIN), chain);
    for (when, action) in rules {
        batch.request(message(libc::NFT_MSG_NEWRULE), |body| {
            rule(body, when, action);
        });
    }
    batch.control(libc::NFNL_MSG_BATCH_END as u16, batch_header);
    batch.send(Family::Filter)
}

fn message(kind: libc::c_int) -> u16 {
    ((libc::NFNL_SUBSYS_NFTABLES << 8) | kind) as u16
}

/// Header of the begin and end of a batch, which names the subsystem.
fn batch_header(body: &mut Bytes) {
    body.put(&[libc::AF_UNSPEC as u8, 0]);
    body.put(&(libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes());
}

fn family(body: &mut Bytes) {
    body.put(&[libc::NFPROTO_INET as u8, 0, 0, 0]);
}

fn chain(body: &mut Bytes) {
    family(body);
    body.name(nfta::CHAIN_TABLE, TABLE);
    body.name(nfta::CHAIN_NAME, CHAIN);
    body.nest(nfta::CHAIN_HOOK, |hook| {
        hook.attribute(nfta::HOOK_HOOKNUM, &libc::NF_INET_LOCAL_OUT.to_be_bytes());
        hook.attribute(nfta::HOOK_PRIORITY, &PRIORITY.to_be_bytes());
    });
    body.attribute(nfta::CHAIN_POLICY, &libc::NF_DROP.to_be_bytes());
    body.name(nfta::CHAIN_TYPE, "nat");
}

fn rule(body: &mut Bytes, when: Match, action: Action) {
    family(body);
    body.name(nfta::RULE_TABLE, TABLE);
    body.name(nfta::RULE_CHAIN, CHAIN);
    body.nest(nfta::RULE_EXPRESSIONS, |list| {
        match when {
            Match::Transport(protocol, port) => {
                meta(list, libc::NFT_META_L4PROTO);
                equals(list, &[protocol as u8]);
                if let Some(port) = port {
                    // The destination port is at the same offset in both protocols.
                    payload(list, libc::NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2);
                    equals(list, &port.to_be_bytes());
                }
            }
            Match::Opening => {
                marked(list, 0);
                payload(list, libc::NFT_PAYLOAD_TRANSPORT_HEADER, FLAGS, 1);
                masked(list, SYN | ACK);
                equals(list, &[SYN]);
            }
            Match::Marked(mark) => marked(list, mark),
            Match::Address(family, begins) => {
                meta(list, libc::NFT_META_NFPROTO);
                equals(list, &[family as u8]);
                let offset = if family == libc::NFPROTO_IPV4 { 16 } else { 24 };
                payload(list, libc::NFT_PAYLOAD_NETWORK_HEADER, offset, begins.len());
                equals(list, begins);
            }
        }
        match action {
            Action::Accept => expression(list, "immediate", |data| {
                register(data, nfta::IMMEDIATE_DREG, libc::NFT_REG_VERDICT);
                data.nest(nfta::IMMEDIATE_DATA, |value| {
                    value.nest(nfta::DATA_VERDICT, |verdict| {
                        let accept = libc::NF_ACCEPT.to_be_bytes();
                        verdict.attribute(nfta::VERDICT_CODE, &accept);
                    });
                });
            }),
            Action::Redirect(port) => {
                expression(list, "immediate", |data| {
                    register(data, nfta::IMMEDIATE_DREG, libc::NFT_REG_1);
                    data.nest(nfta::IMMEDIATE_DATA, |value| {
                        value.attribute(nfta::DATA_VALUE, &port.to_be_bytes());
                    });
                });
                expression(list, "redir", |data| {
                    register(data, nfta::REDIR_REG_PROTO_MIN, libc::NFT_REG_1);
                });
            }
            Action::Queue(QueueMethod::Expression) => expression(list, "queue", |data| {
                data.attribute(nfta::QUEUE_NUM, &syn_queue::QUEUE.to_be_bytes());
                data.attribute(nfta::QUEUE_TOTAL, &1_u16.to_be_bytes());
            }),
            Action::Queue(QueueMethod::Target) => expression(list, "target", |data| {
                data.name(nfta::TARGET_NAME, "NFQUEUE");
                data.attribute(nfta::TARGET_REV, &3_u32.to_be_bytes());
                // Queue number, number of queues, flags, padding.
                let info = [syn_queue::QUEUE, 1, 0, 0].map(u16::to_ne_bytes);
                data.attribute(nfta::TARGET_INFO, info.as_flattened());
            }),
            Action::Reject(kind, code) => expression(list, "reject", |data| {
                data.attribute(nfta::REJECT_TYPE, &kind.to_be_bytes());
                if let Some(code) = code {
                    data.attribute(nfta::REJECT_ICMP_CODE, &[code]);
                }
            }),
        }
    });
}

fn expression(list: &mut Bytes, name: &str, data: impl FnOnce(&mut Bytes)) {
    list.nest(nfta::LIST_ELEM, |element| {
        element.name(nfta::EXPR_NAME, name);
        element.nest(nfta::EXPR_DATA, data);
    });
}

fn register(data: &mut Bytes, attribute: u16, register: libc::c_int) {
    data.attribute(attribute, &register.to_be_bytes());
}

/// Loads metadata of the packet.
fn meta(list: &mut Bytes, key: libc::c_int) {
    expression(list, "meta", |data| {
        register(data, nfta::META_DREG, libc::NFT_REG_1);
        data.attribute(nfta::META_KEY, &key.to_be_bytes());
    });
}

/// Continues only for TCP with this mark.
fn marked(list: &mut Bytes, mark: u32) {
    meta(list, libc::NFT_META_L4PROTO);
    equals(list, &[libc::IPPROTO_TCP as u8]);
    meta(list, libc::NFT_META_MARK);
    equals(list, &mark.to_ne_bytes());
}

/// Masks the loaded byte.
fn masked(list: &mut Bytes, bits: u8) {
    expression(list, "bitwise", |data| {
        register(data, nfta::BITWISE_SREG, libc::NFT_REG_1);
        register(data, nfta::BITWISE_DREG, libc::NFT_REG_1);
        data.attribute(nfta::BITWISE_LEN, &1_u32.to_be_bytes());
        for (attribute, value) in [(nfta::BITWISE_MASK, bits), (nfta::BITWISE_XOR, 0)] {
            data.nest(attribute, |data| data.attribute(nfta::DATA_VALUE, &[value]));
        }
    });
}

/// Loads bytes of the packet.
fn payload(list: &mut Bytes, base: libc::c_int, offset: u32, length: usize) {
    expression(list, "payload", |data| {
        register(data, nfta::PAYLOAD_DREG, libc::NFT_REG_1);
        data.attribute(nfta::PAYLOAD_BASE, &base.to_be_bytes());
        data.attribute(nfta::PAYLOAD_OFFSET, &offset.to_be_bytes());
        data.attribute(nfta::PAYLOAD_LEN, &(length as u32).to_be_bytes());
    });
}

/// Continues only if the loaded value is equal.
fn equals(list: &mut Bytes, value: &[u8]) {
    expression(list, "cmp", |data| {
        register(data, nfta::CMP_SREG, libc::NFT_REG_1);
        data.attribute(nfta::CMP_OP, &libc::NFT_CMP_EQ.to_be_bytes());
        data.nest(nfta::CMP_DATA, |data| {
            data.attribute(nfta::DATA_VALUE, value);
        });
    });
}
