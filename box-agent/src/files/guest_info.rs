//! `agent.guest`: the box as the guest sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;

use box_protocol::actions::GuestInfo;
use rustix::fs::{Mode, OFlags};

use super::guest_root::Step;

/// Interpreters by language, with their program names in order of preference.
const INTERPRETERS: [(&str, &[&str]); 7] = [
    ("bash", &["bash"]),
    ("javascript", &["node", "nodejs"]),
    ("perl", &["perl"]),
    ("php", &["php"]),
    ("python", &["python3", "python"]),
    ("ruby", &["ruby"]),
    ("sh", &["sh"]),
];

/// Other programs that the result lists.
const TOOLS: [&str; 16] = [
    "curl", "ffmpeg", "gcc", "git", "jq", "make", "npm", "npx", "pip3", "rg", "tar", "unzip", "uv",
    "vim", "wget", "zip",
];

/// Maximum bytes read from one file.
const FILE_BYTES: u64 = 1 << 20;

/// Collects the facts.
pub(super) fn guest_info(step: &Step<'_>) -> GuestInfo {
    let env = step.guest_root.env();
    let path = env.get("PATH").map_or("", String::as_str);
    let found = |name: &&str| program(path, name).is_some();
    let interpreters = INTERPRETERS.iter().filter_map(|(language, names)| {
        let program_path = names.iter().find_map(|name| program(path, name))?;
        Some(((*language).to_owned(), program_path))
    });
    let guest = &step.guest_root.guest;
    GuestInfo {
        os: system(),
        arch: std::env::consts::ARCH.to_owned(),
        user: guest.name.clone(),
        home: guest.home.to_string_lossy().into_owned(),
        zone: zone(&env),
        ports: listening_ports(),
        interpreters: interpreters.collect(),
        tools: TOOLS
            .iter()
            .filter(|name| found(name))
            .map(|name| (*name).to_owned())
            .collect(),
    }
}

/// The first part of a file. Opening it never blocks.
fn read_head(path: &str) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let mut bytes = Vec::new();
    let mut head = std::fs::File::from(file).take(FILE_BYTES);
    head.read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The path of an executable program.
fn program(path: &str, name: &str) -> Option<String> {
    path.split(':').find_map(|directory| {
        let program_path = format!("{directory}/{name}");
        let file = std::fs::metadata(&program_path).ok()?;
        (file.is_file() && file.permissions().mode() & 0o111 != 0).then_some(program_path)
    })
}

fn system() -> String {
    let release = read_head("/etc/os-release").unwrap_or_default();
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or("Linux", |name| name.trim_matches('"'))
        .to_owned()
}

fn zone(env: &BTreeMap<String, String>) -> String {
    if let Some(zone) = env.get("TZ") {
        return zone.clone();
    }
    let link = std::fs::read_link("/etc/localtime").unwrap_or_default();
    let zone = link.to_str().and_then(|link| link.split_once("zoneinfo/"));
    zone.map_or("UTC", |(_, zone)| zone).to_owned()
}

/// The TCP ports with a listener, over IPv4 and IPv6.
fn listening_ports() -> Vec<u16> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| read_head(table).unwrap_or_default());
    let ports: BTreeSet<_> = tables.iter().flat_map(|table| ports_of(table)).collect();
    ports.into_iter().collect()
}

/// The ports of the listening rows.
///
/// The columns are number, local address, remote address, state.
fn ports_of(table: &str) -> impl Iterator<Item = u16> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).filter_map(|row| {
        let mut words = row.split_ascii_whitespace();
        let (local, state) = (words.nth(1)?, words.nth(1)?);
        let (_, port) = local.rsplit_once(':')?;
        (state == LISTEN).then(|| u16::from_str_radix(port, 16).ok())?
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_listening_rows_have_a_port() {
        let table = "  sl  local_address rem_address   st tx_queue\n   \
            0: 0100007F:1F40 00000000:0000 0A 00000000:00000000\n   \
            1: 0100007F:1F41 0100007F:9C40 01 00000000:00000000\n\
            invalid\n   \
            2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0\n";
        assert_eq!(super::ports_of(table).collect::<Vec<_>>(), [8000, 80]);
    }
}
