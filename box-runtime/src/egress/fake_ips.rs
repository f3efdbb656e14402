//! Synthetic addresses of names: one per name, stable for the lifetime of the box.
//!
//! No host has such an address. A connection to one identifies a name, which the runtime resolves
//! when it dials. A box therefore never receives a third party's DNS answer, and no answer can
//! become stale inside the box.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::{Host, HostName};

/// Limit of names per box.
const NAMES: usize = 16_384;

/// First synthetic IPv4 address.
///
/// The range 198.18.0.0/15 is reserved for device tests and not routed. The box's interface
/// addresses are below this one.
const FIRST_V4: u32 = u32::from_be_bytes([198, 18, 1, 0]);
/// Network of the synthetic IPv6 addresses.
const NET_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xb0, 0, 1, 0, 0, 0, 0);

/// Table of the names that one box has looked up.
#[derive(Debug, Default)]
pub(crate) struct FakeIps(Mutex<NameTable>);

#[derive(Debug, Default)]
struct NameTable {
    indexes: HashMap<HostName, usize>,
    /// Names by index.
    ///
    /// An unreadable line keeps its index unused, because the box may still hold its addresses.
    names: Vec<Option<HostName>>,
    /// File with one name per line, for the process that adopts the box.
    file: Option<File>,
    /// Length of the complete lines in the file.
    bytes: u64,
}

impl FakeIps {
    /// Loads the table from a file and appends new names to it.
    pub(crate) fn load(mut file: File) -> io::Result<Self> {
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        // An incomplete last line was never given to the box.
        let whole = text.iter().rposition(|byte| *byte == b'\n');
        text.truncate(whole.map_or(0, |end| end + 1));
        let bytes = text.len() as u64;
        file.set_len(bytes)?;
        let names: Vec<_> = text
            .split_inclusive(|byte| *byte == b'\n')
            .map(|line| HostName::new(str::from_utf8(line).ok()?.trim_end()).ok())
            .take(NAMES)
            .collect();
        let known = names.iter().cloned().zip(0..);
        let indexes = known.filter_map(|(name, index)| Some((name?, index)));
        Ok(Self(Mutex::new(NameTable {
            indexes: indexes.collect(),
            names,
            file: Some(file),
            bytes,
        })))
    }

    fn table(&self) -> MutexGuard<'_, NameTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the box has looked up this name before.
    pub(crate) fn known(&self, name: &HostName) -> bool {
        self.table().indexes.contains_key(name)
    }

    /// Returns the addresses of a name, or `None` if the table is full.
    pub(crate) fn addresses_of(&self, name: &HostName) -> Option<(Ipv4Addr, Ipv6Addr)> {
        let mut table = self.table();
        let index = match table.indexes.get(name) {
            Some(index) => *index,
            None if table.names.len() == NAMES => return None,
            None => table.add(name)?,
        };
        let index = u32::try_from(index).ok()?;
        let v6 = Ipv6Addr::from_bits(NET_V6.to_bits() | u128::from(index));
        Some((Ipv4Addr::from_bits(FIRST_V4 + index), v6))
    }

    /// Maps an address to the host it stands for.
    ///
    /// Returns `None` for a synthetic address that was never assigned.
    pub(crate) fn host_at(&self, address: IpAddr) -> Option<Host> {
        let index = match address {
            IpAddr::V4(address) if is_synthetic(address) => {
                address.to_bits().checked_sub(FIRST_V4)?
            }
            IpAddr::V6(address) if address.to_bits() >> 32 == NET_V6.to_bits() >> 32 => {
                let index = address.to_bits() & u128::from(u32::MAX);
                u32::try_from(index).ok()?
            }
            other => return Some(Host::address(other)),
        };
        let table = self.table();
        table
            .names
            .get(usize::try_from(index).ok()?)?
            .clone()
            .map(Host::Name)
    }
}

fn is_synthetic(address: Ipv4Addr) -> bool {
    matches!(address.octets(), [198, 18 | 19, ..])
}

impl NameTable {
    /// Adds a name, or returns `None` if it could not be written to the file.
    ///
    /// An unrecorded address could later be assigned to another name.
    fn add(&mut self, name: &HostName) -> Option<usize> {
        if let Some(file) = &mut self.file {
            // Removes the remains of a failed write.
            file.set_len(self.bytes).ok()?;
            let line = format!("{name}\n");
            file.write_all(line.as_bytes()).ok()?;
            self.bytes += line.len() as u64;
        }
        let index = self.names.len();
        self.names.push(Some(name.clone()));
        self.indexes.insert(name.clone(), index);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HostName {
        HostName::new(text).unwrap()
    }

    #[test]
    fn a_name_keeps_its_addresses_and_they_lead_back_to_it() {
        let names = FakeIps::default();
        let (first, second) = (name("a.example"), name("b.example"));
        let (v4, v6) = names.addresses_of(&first).unwrap();
        assert_ne!(names.addresses_of(&second).unwrap(), (v4, v6));
        assert_eq!(names.addresses_of(&first), Some((v4, v6)));
        for address in [IpAddr::from(v4), IpAddr::from(v6)] {
            assert_eq!(names.host_at(address), Some(Host::Name(first.clone())));
        }
        let literal = "93.184.216.34".parse().unwrap();
        assert_eq!(names.host_at(literal), Some(Host::Address(literal)));
    }

    #[test]
    fn an_unassigned_address_has_no_host() {
        let names = FakeIps::default();
        for address in [
            "198.18.0.1",
            "198.18.0.255",
            "198.18.1.0",
            "198.19.255.255",
            "fd00:b0:0:1::",
            "fd00:b0:0:1::ffff:ffff",
        ] {
            assert_eq!(names.host_at(address.parse().unwrap()), None, "{address}");
        }
    }

    #[test]
    fn the_number_of_names_is_limited() {
        let names = FakeIps::default();
        for n in 0..NAMES {
            assert!(
                names
                    .addresses_of(&name(&format!("n{n}.example")))
                    .is_some()
            );
        }
        assert_eq!(names.addresses_of(&name("more.example")), None);
        let last = name(&format!("n{}.example", NAMES - 1));
        let (v4, _) = names.addresses_of(&last).unwrap();
        assert_eq!(names.host_at(v4.into()), Some(Host::Name(last)));
    }

    #[test]
    fn stored_names_keep_their_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let mut options = std::fs::OpenOptions::new();
            options
                .read(true)
                .append(true)
                .create(true)
                .open(dir.path().join("names"))
                .unwrap()
        };
        let load = || FakeIps::load(open()).unwrap();
        let first = load().addresses_of(&name("a.example"));
        let after = load();
        assert_ne!(after.addresses_of(&name("b.example")), first);
        assert_eq!(after.addresses_of(&name("a.example")), first);
        // The writer was killed in the middle of a line.
        open().write_all(b"half").unwrap();
        let whole = load().addresses_of(&name("c.example"));
        assert!(whole.is_some());
        assert_eq!(load().addresses_of(&name("c.example")), whole);
        // An unreadable line keeps its index.
        open().write_all(b"no name \xff\n").unwrap();
        let next = load();
        let (v4, _) = next.addresses_of(&name("d.example")).unwrap();
        assert_eq!(v4.to_bits(), FIRST_V4 + 4);
        assert_eq!(next.host_at(Ipv4Addr::from_bits(FIRST_V4 + 3).into()), None);
        assert_eq!(next.addresses_of(&name("c.example")), whole);
    }
}
