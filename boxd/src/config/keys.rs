//! The configuration keys with their defaults and descriptions.
//!
//! The example file, the environment variables and the reference are generated from this list.

/// One configuration key.
#[derive(Debug)]
pub(crate) struct Key {
    /// The name with its section: `server.http`.
    pub(crate) name: &'static str,
    /// The default in TOML; empty if the key has none.
    pub(crate) default: &'static str,
    /// An example value in TOML; the default if the key has one.
    pub(crate) example: &'static str,
    /// The description, of one or a few lines.
    pub(crate) about: &'static str,
}

impl Key {
    /// The environment variable that sets the key.
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

/// Keys whose values are tables with names chosen by the operator.
pub(crate) const TABLE_KEYS: &[&str] = &[
    "policy.profiles",
    "policy.gateways",
    "policy.tokens",
    "images.mirrors",
    "images.roots",
    "network.hosts",
];

/// All keys, by section.
pub(crate) const KEYS: &[Key] = &[
    unset(
        "server.listen",
        r#"["unix:/run/boxd/boxd.sock", "tcp://127.0.0.1:7070"]"#,
        "RPC endpoints to listen on: unix:PATH, tcp://HOST:PORT, tls://HOST:PORT, ws://HOST:PORT/PATH.\nDefault: one Unix socket in the state directory, for this user only.",
    ),
    unset(
        "server.http",
        r#""127.0.0.1:7080""#,
        "Address of the HTTP listener: health, metrics, /rpc/ws and the gateways. Port 0 picks a free port.",
    ),
    unset(
        "server.state_dir",
        r#""/var/lib/boxd""#,
        "Directory for boxes and their logs. Default: /var/lib/boxd for root, else boxd in $XDG_STATE_HOME.",
    ),
    unset(
        "server.token_file",
        r#""/etc/boxd/tokens""#,
        "File with the tokens of remote callers, one line each: NAME TOKEN. A token has at least 32 bytes. Only the\nowner may have access to the file. Without tokens the server listens on loopback only (TCP, WebSocket, HTTP).",
    ),
    key(
        "server.allowed_hosts",
        "[]",
        "Host names that HTTP clients may use for this server, besides loopback names.",
    ),
    key(
        "server.allowed_origins",
        "[]",
        "Origins of web pages that may use /rpc, /rpc/ws and the WebSockets of server.listen with a token, such as\nhttps://app.example. Requires tokens. The server refuses the pages of all other origins.",
    ),
    unset(
        "server.public_url",
        r#""https://box.example""#,
        "Base URL of the HTTP listener for shared port addresses, for example that of a reverse proxy.\nDefault: the listening address, or the first of allowed_hosts.",
    ),
    unset(
        "server.box_domain",
        r#""boxes.example""#,
        "Domain of boxes: PORT-ID.DOMAIN is a port of a box, and api.DOMAIN the API of E2B. A reverse proxy with a\nwildcard certificate passes them with their Host header. Default: box.localhost, on this machine only.",
    ),
    unset(
        "server.tls_certificate",
        r#""/etc/boxd/cert.pem""#,
        "Certificate chain for tls:// and wss://, in PEM.",
    ),
    unset(
        "server.tls_key",
        r#""/etc/boxd/key.pem""#,
        "Private key of tls_certificate, in PEM.",
    ),
    unset(
        "server.tls_client_ca",
        r#""/etc/boxd/clients.pem""#,
        "CA certificates. Clients over tls:// must present a certificate signed by one of them.",
    ),
    key(
        "server.max_connections",
        "1024",
        "Maximum concurrent connections per listener. Beyond it, the server closes the oldest connection without a token,\nor else the new connection.",
    ),
    key(
        "server.max_body_mb",
        "256",
        "Maximum size of the body of an HTTP request, in MiB. The server streams bodies, so a larger value needs no more memory.\nJSON bodies are limited to 16 MiB.",
    ),
    key(
        "server.calls_per_token",
        "1024",
        "Maximum concurrent calls per token over all its connections, and the same number of streams. Beyond it, calls fail with\noverloaded.",
    ),
    key(
        "server.drain_sec",
        "10",
        "Seconds that running calls have to finish after SIGTERM.",
    ),
    key(
        "server.keep_boxes",
        "false",
        "Keep boxes running after SIGTERM for the next server of this state directory. After SIGKILL boxes always stay.",
    ),
    key(
        "runtime.backend",
        r#""auto""#,
        "Backend that creates boxes: auto or native.",
    ),
    key(
        "runtime.idle_ttl_sec",
        "300",
        "Idle seconds after which the runtime deletes a box that sets no lifetime.",
    ),
    key(
        "runtime.command_retention_sec",
        "600",
        "Seconds that the output of an ended command stays readable, unless the command sets its own retention.",
    ),
    key(
        "runtime.max_boxes",
        "64",
        "Maximum number of boxes. Beyond it, calls fail with capacity.",
    ),
    unset(
        "runtime.max_boxes_per_token",
        "16",
        "Maximum number of boxes per token. Beyond it, calls fail with capacity. Default: max_boxes.",
    ),
    unset(
        "runtime.max_volume_mb",
        "10240",
        "Maximum size of one volume, in MiB. Beyond it, calls fail with capacity. Default: no limit.",
    ),
    unset(
        "runtime.max_volumes_mb_per_owner",
        "102400",
        "Maximum size of all volumes of one owner together, in MiB. Beyond it, calls fail with capacity. Default: no limit.",
    ),
    unset(
        "runtime.max_snapshots_mb_per_owner",
        "102400",
        "Maximum size of all snapshots and checkpoints of one owner together, in MiB. A layer counts once for each snapshot and\ncheckpoint that contains it. Beyond it, calls fail with capacity. Default: no limit.",
    ),
    key(
        "runtime.queued_calls",
        "128",
        "Maximum number of calls that wait for one box. Beyond it, calls fail with capacity.",
    ),
    key(
        "runtime.start_timeout_sec",
        "120",
        "Seconds that a box may take to start. Beyond it, calls fail with timeout.",
    ),
    key(
        "runtime.stop_timeout_sec",
        "10",
        "Seconds that a box may take to stop. Beyond it, the runtime cleans the box up later.",
    ),
    key(
        "runtime.spares",
        "2",
        "Number of boxes to prepare in advance, for a faster start.",
    ),
    key(
        "runtime.cgroup_parent",
        r#""box""#,
        "Parent cgroup of all boxes. Servers on one machine may share it.",
    ),
    unset(
        "runtime.disk_read_mb_per_s",
        "200",
        "Read limit of each box for each disk, in MiB per second. Requires the cgroup controller io or blkio\n(cgroup.io of boxd doctor). A disk that is attached while the server runs has no limit until the next start.\nDefault: no limit.",
    ),
    unset(
        "runtime.disk_write_mb_per_s",
        "100",
        "Write limit of each box for each disk, in MiB per second. With cgroup version 1 it applies to direct writes only.",
    ),
    key(
        "policy.enabled",
        "true",
        "Allow boxes. If false, calls for boxes fail with unavailable.",
    ),
    key(
        "policy.profile",
        r#""default""#,
        "Active profile: default, offline_readonly, network_basic, network_extended, or one of policy.profiles.",
    ),
    unset(
        "policy.profiles",
        r#"[{ name = "small", cpus = 0.5, memory_mb = 128, locked = ["network"], strict = true }]"#,
        "Additional profiles. A profile with the name of a built-in profile replaces it.",
    ),
    unset(
        "policy.gateways",
        r#"{ langbot = "network_basic" }"#,
        "Profiles of single gateways, by name, instead of `profile`.",
    ),
    unset(
        "policy.shared_host_root",
        r#""/srv/boxes""#,
        "Directory shared with boxes. Its subdirectory `default` is the default workspace.\nUnless allowed_host_mount_roots is set, callers can mount directories below it only.",
    ),
    key(
        "policy.allowed_host_mount_roots",
        "[]",
        "Directories below which callers may mount host paths. An empty list allows none. Over the Unix socket, the user of the\nserver may mount every directory that the user can read, but /etc, /boot, /run and /root only if they are listed here.\nThis user may mount directories inside /root. The server never mounts /proc, /sys or /dev.",
    ),
    unset(
        "policy.default_host_workspace",
        r#""/srv/boxes/default""#,
        "Default workspace, for a box without one.",
    ),
    unset(
        "policy.tokens",
        r#"{ ann = { allowed_host_mount_roots = ["/srv/ann"], default_host_workspace = "/srv/ann/box" } }"#,
        "Mount roots and default workspace of single tokens, by token name. An entry replaces\npolicy.allowed_host_mount_roots, policy.default_host_workspace and --allow-mount for this token.\nAn unknown token name is an error.",
    ),
    unset(
        "policy.workspace_quota_mb",
        "1024",
        "Workspace quota in MiB. Overrides the quota of the profile.",
    ),
    key(
        "policy.max_workspace_entries",
        "100000",
        "Maximum number of files in a workspace with a quota.",
    ),
    key(
        "policy.output_limit_chars",
        "4000",
        "Maximum output that an exec returns, in characters per stream. 0 means no limit.",
    ),
    key(
        "policy.session_id_template",
        r#""{launcher_type}_{launcher_id}""#,
        "Template for the name of a box, if the caller gives none.",
    ),
    key(
        "policy.log_commands",
        "false",
        "Whether the service logs command texts, which may contain secrets.",
    ),
    unset(
        "network.allow",
        r#"["pypi.org", "*.pythonhosted.org", "10.1.2.3:5432", "*:443"]"#,
        "Destinations to allow: host names, *.names, addresses and address ranges, each with an optional port or port range.\nDefault: all public addresses. An empty list allows nothing. An address that is not public (loopback, private, link-local,\nmetadata) must be listed as an address, even if a listed name resolves to it. The policy of a box can only narrow this.",
    ),
    key(
        "network.deny",
        "[]",
        "Destinations to block. Takes precedence over `allow`.",
    ),
    unset(
        "network.default",
        r#""deny""#,
        "Rule for all other destinations: allow or deny. Default: deny if `allow` is set, else allow.",
    ),
    unset(
        "network.hosts",
        r#"{ "mirror.internal" = ["10.1.2.3"] }"#,
        "Addresses of host names. They take precedence over /etc/hosts and DNS.",
    ),
    unset(
        "network.proxy",
        r#""http://proxy.internal:3128""#,
        "HTTP proxy (CONNECT) for all connections of boxes, and to registries on other machines. The proxy then resolves names.\nDefault: HTTPS_PROXY or HTTP_PROXY of the environment. `none` disables it.",
    ),
    key(
        "network.no_proxy",
        "[]",
        "Destinations to reach without the proxy, written as in `allow`.",
    ),
    key(
        "network.connections",
        "1024",
        "Maximum concurrent connections per box. Beyond it, connections are refused.",
    ),
    key(
        "network.connections_per_sec",
        "1000",
        "Maximum new connections per box and second. Further connections wait. 0 means no limit.",
    ),
    key(
        "network.bytes_per_box",
        "0",
        "Maximum bytes that a box may send and receive in total. Beyond it, its connections are reset and new ones refused.\n0 means no limit.",
    ),
    key(
        "network.audit",
        "false",
        "Whether the runtime logs every connection: host name, address, port, and bytes or the reason of the failure.",
    ),
    key(
        "images.strict",
        "false",
        "Refuse boxes that would use the system directories of the machine: those without an image, and those of LangBot if the\nmachine does not have their image.",
    ),
    unset(
        "images.roots",
        r#"{ "python:3.12" = "/srv/roots/python" }"#,
        "Root directories by image name. They take precedence over pulled and imported images.",
    ),
    key(
        "images.allow_pull",
        "[]",
        "Repositories that callers other than the user of the server may pull: debian, ghcr.io/acme/app, ghcr.io/acme/*, or *.\nEvery caller may use the images that the server has.",
    ),
    unset(
        "images.mirrors",
        r#"{ "docker.io" = ["mirror.internal:5000"] }"#,
        "Mirrors by registry. The server tries them in order before the registry.",
    ),
    key(
        "images.insecure_registries",
        "[]",
        "Registries without TLS, as HOST[:PORT]. Registries on this machine need no entry.",
    ),
    unset(
        "images.ca_file",
        r#""/etc/boxd/registry-ca.pem""#,
        "File with certificate authorities of registries in PEM, in addition to those of the system.",
    ),
    key(
        "images.max_download_mb",
        "16384",
        "Maximum size of the compressed layers of an image in MiB.",
    ),
    key(
        "images.max_unpacked_mb",
        "32768",
        "Maximum size of an unpacked image in MiB.",
    ),
    key(
        "images.max_entries",
        "1000000",
        "Maximum number of files and directories in the layers of an image.",
    ),
    key(
        "log.level",
        r#""info""#,
        "Log level: error, warn, info, debug or trace, or by module: info,box_runtime=debug.",
    ),
    key(
        "log.format",
        r#""human""#,
        "Log format on stderr: human or json.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_section_and_is_unique() {
        for (host_port, key) in KEYS.iter().enumerate() {
            assert!(key.name.contains('.'), "{key:?}");
            assert!(!key.about.is_empty() && !key.example.is_empty(), "{key:?}");
            assert!(KEYS[..host_port].iter().all(|other| other.name != key.name));
        }
    }
}
