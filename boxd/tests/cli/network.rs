//! The real program in a network of the test: a machine with one public and one private neighbour.

use std::process::Command;

use crate::support::{BOXD, err, out};

/// Two connected network namespaces. The remote one has a public and a private address, each with a
/// page. In the local one, `boxd` runs as each given user.
const SCRIPT: &str = r#"
set -e
ip link set lo up
unshare -n sleep 60 >/dev/null 2>&1 & far=$!
trap 'kill $far $one $two; rm -rf "$dir"' EXIT
while [ "$(readlink /proc/$far/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link add near type veth peer name far netns $far
ip addr add 93.184.216.1/24 dev near
ip addr add 10.9.9.1/24 dev near
ip link set near up
in_far() { nsenter -t $far -n "$@"; }
in_far ip link set lo up
in_far ip link set far up
in_far ip addr add 93.184.216.34/24 dev far
in_far ip addr add 10.9.9.9/24 dev far
dir=$(mktemp -d)
chmod 755 "$dir"
cd "$dir"
cp "$1" boxd
boxd=$dir/boxd
echo page > index.html
nsenter -t $far -n /usr/bin/python3 -m http.server 8080 >/dev/null 2>&1 & one=$!
/usr/bin/python3 -m http.server 8081 >/dev/null 2>&1 & two=$!
for n in $(seq 200); do curl -s -m 1 http://93.184.216.34:8080/ >/dev/null && curl -s -m 1 http://10.9.9.9:8080/ >/dev/null \
    && curl -s -m 1 http://93.184.216.1:8081/ >/dev/null && break; sleep 0.05; done
for who in $2; do
    as=env
    [ $who = root ] || as='setpriv --reuid 65534 --regid 65534 --clear-groups env'
    try() { $as BOXD_NETWORK_PROXY=none "$boxd" run "$@" 2>/dev/null || echo refused; }
    echo "public $(try --network on -- curl -s -m 20 http://93.184.216.34:8080/)"
    echo "private $(try --network on -- curl -s -m 20 http://10.9.9.9:8080/)"
    echo "own $(try --network on -- curl -s -m 20 http://93.184.216.1:8081/)"
    echo "listed $(try --allow 10.9.9.0/24:8080 -- curl -s -m 20 http://10.9.9.9:8080/)"
    echo "unlisted $(try --allow 10.9.9.0/24:8080 -- curl -s -m 20 http://93.184.216.34:8080/)"
    refusals() { $as BOXD_NETWORK_PROXY=none "$boxd" "$@" 2>&1 >/dev/null | grep ' refused ' | sort | tr '\n' ' '; echo; }
    twice='curl -s -m 20 http://93.184.216.34:8080/; curl -s -m 20 http://93.184.216.34:8080/; curl -s http://elsewhere.example/'
    echo "says $(refusals run --allow 10.9.9.0/24:8080 "$twice")"
    echo "says $(refusals run --network on 'curl -s -m 20 http://93.184.216.34:8080/')"
    state=$(mktemp -d)
    [ $who = root ] || chown 65534:65534 "$state"
    $as BOXD_NETWORK_PROXY=none "$boxd" serve --state-dir "$state/s" >"$dir/ready.$who" 2>/dev/null & serve=$!
    for n in $(seq 400); do grep -q ready "$dir/ready.$who" && break; sleep 0.05; done
    for n in 1 2; do
        echo "says $(refusals --endpoint "unix:$state/s/boxd.sock" run --name b --allow 10.9.9.0/24:8080 "$twice")"
    done
    kill $serve
    wait $serve || true
    rm -rf "$state"
    echo "off $(try --network off -- curl -s -m 20 http://93.184.216.34:8080/)"
done
"#;

#[test]
fn private_addresses_are_reachable_only_if_listed() {
    let root = rustix::process::geteuid().is_root();
    // An ordinary user is root in new namespaces, and has no other user there.
    let (namespaces, users) = if root {
        ("-n", "root other")
    } else {
        ("-rn", "root")
    };
    let mut command = Command::new("unshare");
    command.args([namespaces, "sh", "-c", SCRIPT, "sh", BOXD, users]);
    let ran = command.output().unwrap();
    let says = "says boxd: refused 93.184.216.34:8080 (not in --allow) boxd: refused elsewhere.example (not in --allow) \n";
    // A separate run, one with an open network, and two in a box of a server, each with its lines.
    let says = format!("{says}says \n{says}{says}");
    let expected = "public page\nprivate refused\nown refused\nlisted page\nunlisted refused\n";
    let expected = format!("{expected}{says}off refused\n");
    let expected = expected.repeat(if root { 2 } else { 1 });
    assert_eq!(out(&ran), expected, "{}", err(&ran));
}
