//! Every key of the configuration: its name, its value unless said otherwise, and what it is for. The example file, the
//! environment's names and the list of what is known all come from here.

/// One key.
#[derive(Debug)]
pub(crate) struct Key {
    /// With its section: `server.http`.
    pub(crate) name: &'static str,
    /// As it stands in a file; empty for one that is not set.
    pub(crate) default: &'static str,
    /// An example for one that is not set.
    pub(crate) example: &'static str,
    /// What it is for, in a line or two.
    pub(crate) about: &'static str,
}

impl Key {
    /// The variable of the environment that sets it.
    pub(crate) fn variable(&self) -> String {
        format!("BOXD_{}", self.name.replace('.', "_").to_uppercase())
    }
}

const fn key(name: &'static str, default: &'static str, about: &'static str) -> Key {
    Key {
        name,
        default,
        example: default,
        about,
    }
}

const fn unset(name: &'static str, example: &'static str, about: &'static str) -> Key {
    Key {
        name,
        default: "",
        example,
        about,
    }
}

/// Keys below which anything may stand: tables whose names are the operator's.
pub(crate) const FREE: &[&str] = &[
    "policy.profiles",
    "policy.tokens",
    "images.roots",
    "network.hosts",
];

/// All of them, by section.
pub(crate) const KEYS: &[Key] = &[
    unset(
        "server.listen",
        r#"["unix:/run/boxd/boxd.sock", "tcp://127.0.0.1:7070"]"#,
        "Where to listen for RPC: unix:PATH, tcp://HOST:PORT, tls://HOST:PORT, ws://HOST:PORT/PATH.\nUnless set: one Unix socket in the state directory, for this user only.",
    ),
    unset(
        "server.http",
        r#""127.0.0.1:7080""#,
        "The one HTTP port: health, metrics, /rpc/ws and the gateways. Port 0 takes any.",
    ),
    unset(
        "server.state_dir",
        r#""/var/lib/boxd""#,
        "Where boxes and their logs are kept. Unless set: /var/lib/boxd for root, else boxd in $XDG_STATE_HOME.",
    ),
    unset(
        "server.token_file",
        r#""/etc/boxd/tokens""#,
        "Tokens of callers from the network, one a line: NAME TOKEN. At least 32 bytes each. The file must be\nreadable by its owner only. Without tokens nothing but loopback is served over TCP, WebSocket or HTTP.",
    ),
    key(
        "server.allowed_hosts",
        "[]",
        "Names by which this server may be called over HTTP, besides loopback ones.",
    ),
    unset(
        "server.public_url",
        r#""https://box.example""#,
        "How the HTTP port is called from outside, for addresses that are handed out: a proxy's, for one.\nUnless set: where it listens, or the first of allowed_hosts.",
    ),
    unset(
        "server.tls_certificate",
        r#""/etc/boxd/cert.pem""#,
        "The certificate chain for tls:// and wss://.",
    ),
    unset("server.tls_key", r#""/etc/boxd/key.pem""#, "Its key."),
    unset(
        "server.tls_client_ca",
        r#""/etc/boxd/clients.pem""#,
        "Callers over tls:// must show a certificate signed by one of these.",
    ),
    key(
        "server.max_connections",
        "1024",
        "Connections at once to each listener. Beyond: the oldest without a token makes room, or else the new one is closed.",
    ),
    key(
        "server.calls_per_token",
        "1024",
        "Calls at once of one token, over all its connections, and as many streams. Beyond: overloaded.",
    ),
    key(
        "server.drain_sec",
        "10",
        "How long running calls may go on after SIGTERM.",
    ),
    key(
        "server.keep_boxes",
        "false",
        "Leave boxes running at SIGTERM, for the next server of this state directory. A server that is killed always does.",
    ),
    key(
        "runtime.backend",
        r#""auto""#,
        "What makes boxes: auto or native.",
    ),
    key(
        "runtime.session_ttl_sec",
        "300",
        "Idle time after which a box is deleted, unless its lifetime says otherwise.",
    ),
    key(
        "runtime.command_retention_sec",
        "600",
        "How long an ended command can still be read, unless it was started with a time of its own.",
    ),
    key(
        "runtime.max_sessions",
        "64",
        "Boxes there may be at once. Beyond: capacity.",
    ),
    unset(
        "runtime.max_sessions_per_token",
        "16",
        "Boxes of one token at once. Beyond: capacity. Unless set: as many as there may be.",
    ),
    key(
        "runtime.queued_calls",
        "128",
        "Calls that may wait for one box. Beyond: capacity.",
    ),
    key(
        "runtime.start_timeout_sec",
        "120",
        "How long a box may take to start. Beyond: timeout.",
    ),
    key(
        "runtime.stop_timeout_sec",
        "10",
        "How long a box may take to end. Beyond: it is given up and swept later.",
    ),
    key(
        "runtime.spares",
        "2",
        "Boxes that are begun before they are asked for, so that they start faster.",
    ),
    key(
        "runtime.cgroup_parent",
        r#""box""#,
        "The cgroup under which boxes get theirs. Servers of one machine may share it.",
    ),
    unset(
        "runtime.disk_read_mb_per_s",
        "200",
        "The most that each box reads from each disk, in MiB per second. Needs the cgroup controller io or blkio\n(cgroup.io of boxd doctor). Unless set: no limit.",
    ),
    unset(
        "runtime.disk_write_mb_per_s",
        "100",
        "The same for writing. With cgroups of version 1 it holds for direct writes only.",
    ),
    key(
        "policy.enabled",
        "true",
        "Whether boxes are offered at all.",
    ),
    key(
        "policy.profile",
        r#""default""#,
        "The profile in use: default, offline_readonly, network_basic, network_extended, or one of policy.profiles.",
    ),
    unset(
        "policy.profiles",
        r#"[{ name = "small", cpus = 0.5, memory_mb = 128, locked = ["network"], strict = true }]"#,
        "Profiles of your own. One with a built-in's name takes its place.",
    ),
    unset(
        "policy.shared_host_root",
        r#""/srv/boxes""#,
        "One directory for everything that is shared with boxes: its subdirectory `default` is the default\nworkspace, and unless said otherwise it is the only directory that may be mounted.",
    ),
    key(
        "policy.allowed_host_mount_roots",
        "[]",
        "Directories below which host paths may be mounted. None means that none may. The user of the server may mount, over the\nUnix socket, every directory that this user can read; places of the system (/etc, /root, /run, ...) only if a root names them.",
    ),
    unset(
        "policy.default_host_workspace",
        r#""/srv/boxes/default""#,
        "The workspace of a box that names none.",
    ),
    unset(
        "policy.tokens",
        r#"{ ann = { allowed_host_mount_roots = ["/srv/ann"], default_host_workspace = "/srv/ann/box" } }"#,
        "What callers with single tokens may mount, by the token's name, in place of the two keys above and of `--allow-mount`. A name that no token has is refused.",
    ),
    unset(
        "policy.workspace_quota_mb",
        "1024",
        "Takes the place of the profile's quota of a workspace.",
    ),
    key(
        "policy.max_workspace_entries",
        "100000",
        "The most files a workspace with a quota may have.",
    ),
    key(
        "policy.output_limit_chars",
        "4000",
        "The longest output of an exec that is returned, in characters of each stream; 0 for no limit.",
    ),
    key(
        "policy.session_id_template",
        r#""{launcher_type}_{launcher_id}""#,
        "How a box is named whose caller does not.",
    ),
    key(
        "policy.log_commands",
        "false",
        "Whether the texts of commands go into the log. They may hold secrets.",
    ),
    unset(
        "network.allow",
        r#"["pypi.org", "*.pythonhosted.org", "10.1.2.3:5432", "*:443"]"#,
        "To whom boxes with a network may connect: names, *.names, addresses and ranges, each with a port or a range\nof ports if need be. Unless set: to everybody with a public address. An empty list: to nobody. Addresses that are not\npublic (loopback, private, link-local, metadata) are reached only if they are listed as addresses, whatever name\nleads to them. A box's own policy can only narrow this.",
    ),
    key(
        "network.deny",
        "[]",
        "To whom they may not, whatever allows it.",
    ),
    unset(
        "network.default",
        r#""deny""#,
        "What becomes of the rest: allow or deny. Unless set: deny if there is an allow, allow if there is none.",
    ),
    unset(
        "network.hosts",
        r#"{ "mirror.internal" = ["10.1.2.3"] }"#,
        "Addresses of names, before /etc/hosts and the machine's name servers are asked.",
    ),
    unset(
        "network.proxy",
        r#""http://proxy.internal:3128""#,
        "Connect through this HTTP proxy, by CONNECT; it then looks names up. Unless set: HTTPS_PROXY or HTTP_PROXY of\nthe environment, if there is one. `none` for none.",
    ),
    key(
        "network.no_proxy",
        "[]",
        "To whom to connect without it, written as in allow.",
    ),
    key(
        "network.connections",
        "1024",
        "Connections of one box at once. Beyond: refused.",
    ),
    key(
        "network.connections_per_sec",
        "1000",
        "New connections of one box in a second; what comes faster waits. 0 for no limit.",
    ),
    key(
        "network.bytes_per_box",
        "0",
        "Bytes that one box may send and receive together. Beyond: reset, and new ones refused. 0 for no limit.",
    ),
    key(
        "network.audit",
        "false",
        "Whether every connection goes into the log: name, address, port, bytes, or why it was not made.",
    ),
    key(
        "images.strict",
        "false",
        "Refuse images that are not listed below, instead of running on the machine's own system directories.",
    ),
    unset(
        "images.roots",
        r#"{ "python:3.12" = "/srv/roots/python" }"#,
        "Root directories by the name of an image.",
    ),
    key(
        "log.level",
        r#""info""#,
        "error, warn, info, debug or trace; or by module: info,box_runtime=debug.",
    ),
    key(
        "log.format",
        r#""human""#,
        "human or json, to standard error.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_section_and_stands_once() {
        for (place, key) in KEYS.iter().enumerate() {
            assert!(key.name.contains('.'), "{key:?}");
            assert!(!key.about.is_empty() && !key.example.is_empty(), "{key:?}");
            assert!(KEYS[..place].iter().all(|other| other.name != key.name));
        }
    }
}
