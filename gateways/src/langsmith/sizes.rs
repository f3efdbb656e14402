//! CPUs, memory and disk of boxes: their units, and the limits of this server.

use box_protocol::Invalid;

/// The limits of the CPUs of a box.
const MIN_CPUS: f64 = 0.01;
const MAX_CPUS: f64 = 1024.0;

/// The maximum memory of a box, in MiB: more than a machine has, and few enough for all units.
pub(super) const MAX_MEMORY_MB: u64 = 1 << 30;

/// The maximum size of the private files of a box, in MiB.
pub(super) const MAX_DISK_MB: u64 = 8 << 20;

/// Refuses fewer or more CPUs than a box can have.
pub(super) fn check_cpus(field: &'static str, cpus: Option<f64>) -> Result<(), Invalid> {
    if cpus.is_some_and(|cpus| !(MIN_CPUS..=MAX_CPUS).contains(&cpus)) {
        let rule = format!("must be between {MIN_CPUS} and {MAX_CPUS}");
        return Err(Invalid::new(field, rule));
    }
    Ok(())
}

/// Returns thousandths of CPUs as CPUs, and refuses fewer or more than a box can have.
pub(super) fn check_millicores(
    field: &'static str,
    millicores: Option<u64>,
) -> Result<Option<f64>, Invalid> {
    let Some(asked) = millicores else {
        return Ok(None);
    };
    let (least, most) = (self::millicores(MIN_CPUS), self::millicores(MAX_CPUS));
    if !(least..=most).contains(&asked) {
        let rule = format!("must be between {least} and {most}");
        return Err(Invalid::new(field, rule));
    }
    #[allow(clippy::cast_precision_loss, reason = "the limit is small")]
    let cpus = asked as f64 / 1000.0;
    Ok(Some(cpus))
}

/// Returns CPUs in thousandths.
pub(super) fn millicores(cpus: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and the cast saturates"
    )]
    let millicores = (cpus * 1000.0).round() as u64;
    millicores
}

/// Refuses a size beyond a maximum, both in MiB. The error has the maximum in bytes.
pub(super) fn check_megabytes(
    field: &'static str,
    megabytes: Option<u64>,
    most: u64,
) -> Result<(), Invalid> {
    if megabytes.is_some_and(|megabytes| megabytes > most) {
        let rule = format!("must be at most {} bytes", bytes(most));
        return Err(Invalid::new(field, rule));
    }
    Ok(())
}

/// Returns a number of bytes as whole MiB, rounded up.
pub(super) fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Returns MiB as bytes.
pub(super) fn bytes(megabytes: u64) -> u64 {
    megabytes.saturating_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_the_name_and_the_unit_of_their_field() {
        let few = check_cpus("vcpus", Some(0.001)).unwrap_err();
        assert_eq!(few.to_string(), "vcpus: must be between 0.01 and 1024");
        assert!(check_cpus("vcpus", Some(1025.0)).is_err());
        assert_eq!(check_cpus("vcpus", Some(1024.0)), Ok(()));
        for millicores in [0, 9, 1_024_001, u64::MAX] {
            let refused = check_millicores("cpu_millicores", Some(millicores)).unwrap_err();
            let text = "cpu_millicores: must be between 10 and 1024000";
            assert_eq!(refused.to_string(), text);
        }
        assert_eq!(check_millicores("c", Some(1500)), Ok(Some(1.5)));
        let most = mebibytes(u64::MAX);
        let refused = check_megabytes("mem_bytes", Some(most), MAX_MEMORY_MB).unwrap_err();
        let text = "mem_bytes: must be at most 1125899906842624 bytes";
        assert_eq!(refused.to_string(), text);
        let same = check_megabytes("m", Some(MAX_MEMORY_MB), MAX_MEMORY_MB);
        assert_eq!(same, Ok(()));
    }

    #[test]
    fn bytes_do_not_overflow() {
        assert_eq!((bytes(512), bytes(1 << 50)), (512 << 20, u64::MAX));
    }
}
