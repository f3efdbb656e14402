//! Times in Python's format.

use box_protocol::UnixMs;

/// A time in microseconds, so that LangBot gets back exactly the time it sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::langbot) struct Micros(pub(in crate::langbot) u64);

impl Micros {
    pub(super) fn is_past(self, now: UnixMs) -> bool {
        self.0 / 1000 <= now.0
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        let (clock, offset) = if let Some(clock) = text.strip_suffix('Z') {
            (clock, 0)
        } else {
            let at = text.len().checked_sub(6)?;
            (text.get(..at)?, minutes(text.get(at..)?)?)
        };
        let seconds = clock.split_once('.').map_or(clock, |(seconds, _)| seconds);
        let fraction = clock.split_once('.').map_or("0", |(_, fraction)| fraction);
        if fraction.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let micros: u64 = format!("{fraction:0<6}").get(..6)?.parse().ok()?;
        let whole = UnixMs::from_text(&format!("{seconds}Z"))?;
        let whole = i64::try_from(whole.0).ok()? - offset * 60_000;
        Some(Self(u64::try_from(whole).ok()?.checked_mul(1000)? + micros))
    }

    pub(in crate::langbot) fn to_text(self) -> String {
        let whole = UnixMs(self.0 / 1000).to_string();
        let seconds = whole.get(..19).unwrap_or(&whole);
        match self.0 % 1_000_000 {
            0 => format!("{seconds}+00:00"),
            micros => format!("{seconds}.{micros:06}+00:00"),
        }
    }
}

/// Returns the offset of a time zone such as `+08:00`, in minutes.
fn minutes(zone: &str) -> Option<i64> {
    let sign = match zone.as_bytes().first()? {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let (hours, minutes) = zone[1..].split_once(':')?;
    let minutes: i64 = minutes
        .parse()
        .ok()
        .filter(|number| (0..60).contains(number))?;
    let hours: i64 = hours
        .parse()
        .ok()
        .filter(|number| (0..24).contains(number))?;
    Some(sign * (hours * 60 + minutes))
}
