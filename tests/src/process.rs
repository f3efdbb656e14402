//! The memory of processes.

/// A field in kibibytes of a `/proc/PID/status` text, such as `VmHWM`.
pub fn status_kib(status: &str, field: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    let value = value.expect("the field").trim_start_matches(':');
    let value = value.split_whitespace().next().expect("a value");
    value.parse().expect("a number")
}
