//! DNS queries over UDP and TCP.

use super::*;

fn set_up(config: &mut NativeConfig) {
    let hosts = [("yes.test", "127.0.0.7"), ("no.test", "127.0.0.7")];
    open(config, json!(["yes.test", "127.0.0.7"]), &hosts);
}

const ASK: &str = "
def ask(name, kind=1, ident=7):
    labels = b''.join(bytes([len(l)]) + l for l in name)
    return struct.pack('>HHHHHH', ident, 0x100, 1, 0, 0, 0) + labels + b'\\0' + struct.pack('>HH', kind, 1)
def summary(answer):
    code, count = answer[3] & 15, answer[7]
    return f'{code}/{count}/' + ('.'.join(map(str, answer[-4:])) if count else '')
def udp(question, to=('9.9.9.9', 53)):
    s = socket.socket(socket.AF_INET6 if ':' in to[0] else socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
    for _ in range(60):
        s.sendto(question, to)
        try: answer, by = s.recvfrom(4096)
        except TimeoutError: continue
        assert by[:2] == to, by
        return summary(answer)
def tcp(*questions, to=('9.9.9.9', 53)):
    s = dial(*to); f = s.makefile('rb'); out = []
    for q in questions:
        s.sendall(struct.pack('>H', len(q)) + q)
        out.append(summary(f.read(struct.unpack('>H', f.read(2))[0])))
    return ' '.join(out)
yes, no = [b'YES', b'test'], [b'no', b'test']
";

#[tokio::test]
async fn names_resolve_over_udp_and_tcp_at_any_server() {
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let text = format!(
            "{ASK}
print(udp(ask(yes)), udp(ask(yes), ('1.2.3.4', 53)), udp(ask(yes), ('2620:fe::fe', 53)), udp(ask(yes), ('127.0.0.1', 53)))
print(tcp(ask(yes), ask(no), ask(yes, 28)), tcp(ask(yes), to=('2620:fe::fe', 53)))
print(udp(ask(no)), udp(ask([b'yes', b'test', b'evil'])), udp(ask([b'yes\\0', b'test'])), udp(ask([b'2130706433'])), udp(ask(yes, 16)))"
        );
        let reported = says(machine, "ask", &text).await;
        let yes = "0/1/198.18.1.0";
        let lines: Vec<_> = reported.lines().collect();
        assert_eq!(lines[0], [yes; 4].join(" "));
        assert_eq!(lines[1], format!("{yes} 3/0/ 0/1/0.0.0.0 {yes}"));
        assert_eq!(lines[2], "3/0/ 3/0/ 3/0/ 3/0/ 0/0/");
    })
    .await;
}

#[tokio::test]
async fn dns_survives_garbage_and_floods_and_other_datagrams_are_refused() {
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let text = format!(
            "{ASK}
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(3000):
    s.sendto(os.urandom(n % 600), ('9.9.9.9', 53))
for junk in b'', b'\\0', b'\\xff\\xff' + os.urandom(70000), b'\\0\\x05hello':
    t = dial('9.9.9.9', 53); word(lambda: t.sendall(junk)); t.close()
print(udp(ask(yes)), tcp(ask(yes)))
print(word(lambda: s.sendto(b'x', ('9.9.9.9', 54))), word(lambda: s.sendto(b'x', ('198.18.1.0', 123))))"
        );
        let reported = says(machine, "flood", &text).await;
        assert_eq!(reported, "0/1/198.18.1.0 0/1/198.18.1.0\nEPERM EPERM");
    })
    .await;
}
