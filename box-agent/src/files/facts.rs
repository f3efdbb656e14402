//! `agent.guest`: what the box is like from inside, as the guest finds it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;

use box_protocol::actions::GuestFacts;
use rustix::fs::{Mode, OFlags};

use super::ground::Step;

/// Interpreters that clients ask for: the language, and what it may be called, the best first.
const INTERPRETERS: [(&str, &[&str]); 7] = [
    ("bash", &["bash"]),
    ("javascript", &["node", "nodejs"]),
    ("perl", &["perl"]),
    ("php", &["php"]),
    ("python", &["python3", "python"]),
    ("ruby", &["ruby"]),
    ("sh", &["sh"]),
];

/// Other programs that clients ask for.
const TOOLS: [&str; 16] = [
    "curl", "ffmpeg", "gcc", "git", "jq", "make", "npm", "npx", "pip3", "rg", "tar", "unzip", "uv",
    "vim", "wget", "zip",
];

/// The most that is read of one file.
const FILE_BYTES: u64 = 1 << 20;

/// What the guest finds.
pub(super) fn facts(step: &Step<'_>) -> GuestFacts {
    let env = step.ground.env();
    let path = env.get("PATH").map_or("", String::as_str);
    let found = |name: &&str| program(path, name).is_some();
    let interpreters = INTERPRETERS.iter().filter_map(|(language, names)| {
        let place = names.iter().find_map(|name| program(path, name))?;
        Some(((*language).to_owned(), place))
    });
    let guest = &step.ground.guest;
    GuestFacts {
        os: system(),
        arch: std::env::consts::ARCH.to_owned(),
        user: guest.name.clone(),
        home: guest.home.to_string_lossy().into_owned(),
        zone: zone(&env),
        ports: listening(),
        interpreters: interpreters.collect(),
        tools: TOOLS
            .iter()
            .filter(|name| found(name))
            .map(|name| (*name).to_owned())
            .collect(),
    }
}

/// The first of a file. Whatever it is, it is not waited for.
fn first_of(path: &str) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let mut bytes = Vec::new();
    let mut first = std::fs::File::from(file).take(FILE_BYTES);
    first.read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Where a program is that can be run.
fn program(path: &str, name: &str) -> Option<String> {
    path.split(':').find_map(|directory| {
        let place = format!("{directory}/{name}");
        let file = std::fs::metadata(&place).ok()?;
        (file.is_file() && file.permissions().mode() & 0o111 != 0).then_some(place)
    })
}

fn system() -> String {
    let release = first_of("/etc/os-release").unwrap_or_default();
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

/// Ports somebody listens on, over either kind of address.
fn listening() -> Vec<u16> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| first_of(table).unwrap_or_default());
    let ports: BTreeSet<_> = tables.iter().flat_map(|table| ports(table)).collect();
    ports.into_iter().collect()
}

/// The ports of the rows that listen: number, local address and port, the other's, state.
fn ports(table: &str) -> impl Iterator<Item = u16> {
    const LISTENS: &str = "0A";
    table.lines().skip(1).filter_map(|row| {
        let mut words = row.split_ascii_whitespace();
        let (local, state) = (words.nth(1)?, words.nth(1)?);
        let (_, port) = local.rsplit_once(':')?;
        (state == LISTENS).then(|| u16::from_str_radix(port, 16).ok())?
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_row_that_listens_has_a_port() {
        let table = "  sl  local_address rem_address   st tx_queue\n   \
            0: 0100007F:1F40 00000000:0000 0A 00000000:00000000\n   \
            1: 0100007F:1F41 0100007F:9C40 01 00000000:00000000\n\
            nonsense\n   \
            2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0\n";
        assert_eq!(super::ports(table).collect::<Vec<_>>(), [8000, 80]);
    }
}
