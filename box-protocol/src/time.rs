//! Times in Unix milliseconds, and their text form for gateways.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A time in milliseconds since 1970-01-01 UTC.
///
/// [`Display`](fmt::Display) gives it as text: `2026-11-15T23:18:17.977000Z`.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct UnixMs(pub u64);

const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// The end of 31 December 9999, the last day with a four-digit year.
const LAST_MS: u64 = 253_402_300_799_999;

impl UnixMs {
    /// Returns the current time of the system clock.
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// Returns the time since `earlier`; zero if the clock was set back.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// Parses `YYYY-MM-DDTHH:MM:SS`, an optional fraction, and `Z` or `+00:00`.
    ///
    /// Digits after the milliseconds are ignored.
    pub fn from_text(text: &str) -> Option<Self> {
        let text = text
            .strip_suffix('Z')
            .or_else(|| text.strip_suffix("+00:00"))?;
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let (date, clock) = whole.split_once('T')?;
        let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
        let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
        if hour > 23 || minute > 59 || second > 59 || fraction.is_empty() {
            return None;
        }
        if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let milliseconds: u64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
        let days = days_since_1970(year, month, day)?;
        let seconds = (hour * 60 + minute) * 60 + second;
        Some(Self(days * DAY_MS + seconds * 1000 + milliseconds))
    }
}

fn numbers(text: &str, separator: char, widths: [usize; 3]) -> Option<[u64; 3]> {
    let mut parts = text.split(separator);
    let mut found = [0; 3];
    for (slot, width) in found.iter_mut().zip(widths) {
        let part = parts.next()?;
        if part.len() != width || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *slot = part.parse().ok()?;
    }
    parts.next().is_none().then_some(found)
}

// Both directions count years from March, so that the leap day is the last day of a year. They
// shift by the 719,468 days from 1 March of year 0 to 1 January 1970.

fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    if year < 1970 || !(1..=12).contains(&month) || day == 0 {
        return None;
    }
    let (march_year, march_month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let leap_days = march_year / 4 - march_year / 100 + march_year / 400;
    let days = march_year * 365 + leap_days + (march_month * 153 + 2) / 5 + day - 1 - 719_468;
    // An invalid day converts back to a day of the next month.
    (date_of(days) == (year, month, day)).then_some(days)
}

fn date_of(days_since_1970: u64) -> (u64, u64, u64) {
    let days = days_since_1970 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (year_of_era * 365 + year_of_era / 4 - year_of_era / 100);
    let march_month = (day_of_year * 5 + 2) / 153;
    let day = day_of_year - (march_month * 153 + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

impl fmt::Display for UnixMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.0.min(LAST_MS);
        let (year, month, day) = date_of(at / DAY_MS);
        let in_day = at % DAY_MS;
        let (seconds, milliseconds) = (in_day / 1000, in_day % 1000);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}"
        )?;
        write!(f, ".{milliseconds:03}000Z")
    }
}

/// A time before 1970 is 1970.
impl From<SystemTime> for UnixMs {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_times() {
        for (at, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000000Z"),
            (1_794_784_697_977, "2026-11-15T23:18:17.977000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000000Z"),
            (LAST_MS, "9999-12-31T23:59:59.999000Z"),
        ] {
            assert_eq!(UnixMs(at).to_string(), text);
            assert_eq!(UnixMs::from_text(text), Some(UnixMs(at)));
        }
    }

    #[test]
    fn microseconds_are_ignored() {
        let at = UnixMs::from_text("2026-11-15T23:18:17.977162Z");
        assert_eq!(at, Some(UnixMs(1_794_784_697_977)));
        assert_eq!(
            UnixMs::from_text("2026-11-15T23:18:17+00:00"),
            Some(UnixMs(1_794_784_697_000))
        );
        assert_eq!(
            UnixMs::from_text("1970-01-01T00:00:00.5Z"),
            Some(UnixMs(500))
        );
    }

    #[test]
    fn invalid_text_is_rejected() {
        for bad in [
            "",
            "Z",
            "2026-11-15T23:18:17",
            "2026-11-15 23:18:17Z",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-00-10T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "1969-12-31T23:59:59Z",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00.-1Z",
            "+026-01-01T00:00:00Z",
            "2026-1-01T00:00:00Z",
        ] {
            assert_eq!(UnixMs::from_text(bad), None, "{bad}");
        }
    }

    #[test]
    fn json_has_the_number() {
        assert_eq!(serde_json::to_string(&UnixMs(17)).unwrap(), "17");
    }

    #[test]
    fn a_clock_set_back_gives_zero() {
        assert_eq!(UnixMs(5).since(UnixMs(9)), Duration::ZERO);
        assert_eq!(UnixMs(9).since(UnixMs(5)), Duration::from_millis(4));
    }

    proptest! {
        #[test]
        fn text_and_number_agree(at in 0..=LAST_MS) {
            prop_assert_eq!(UnixMs::from_text(&UnixMs(at).to_string()), Some(UnixMs(at)));
        }
    }
}
