//! Test counts from the output of the test runners.

use std::fmt;

/// The runner that wrote the output.
///
/// Only one format is read at a time: nextest prints the output of failed tests, including libtest's summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runner {
    /// `test result: ok. 3 passed; 0 failed; …`.
    Libtest,
    /// `Summary [   0.012s] 5 tests run: 3 passed, 1 failed, 1 timed out, 0 skipped`.
    Nextest,
    /// `1 failed, 3 passed, 2 warnings in 0.12s`, optionally between `=`.
    Pytest,
}

/// The sum of all reports so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// The number of summaries; 0 means that the runner's format has changed.
    pub(crate) reports: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.reports += other.reports;
    }

    /// Reads one line of a runner's output, and ignores all but its summary.
    pub(crate) fn read(&mut self, runner: Runner, line: &str) {
        let (begins, then) = match runner {
            Runner::Libtest => ("test result: ", ". "),
            Runner::Nextest => ("Summary [", " run: "),
            Runner::Pytest => return self.read_pytest(line),
        };
        let tail = line
            .trim()
            .strip_prefix(begins)
            .and_then(|rest| rest.split_once(then));
        let Some((_, tail)) = tail else { return };
        self.add_up(tail);
    }

    fn read_pytest(&mut self, line: &str) {
        let line = line.trim_matches(|c| c == '=' || c == ' ');
        let Some((tail, time)) = line.rsplit_once(" in ") else {
            return;
        };
        let is_time = time.starts_with(|c: char| c.is_ascii_digit()) && time.contains('s');
        if is_time && tail.starts_with(|c: char| c.is_ascii_digit()) {
            self.add_up(tail);
        }
    }

    fn add_up(&mut self, tail: &str) {
        self.reports += 1;
        for part in tail.split([',', ';']) {
            let Some((number, word)) = part.trim().split_once(' ') else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            // nextest appends `(1 slow, 1 flaky)` to `passed`, which already includes those.
            match word.split(" (").next().unwrap_or_default() {
                "passed" => self.passed += number,
                "failed"
                | "error"
                | "errors"
                | "timed out"
                | "exec failed"
                | "failed due to setup" => {
                    self.failed += number;
                }
                _ => {}
            }
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, Runner};

    fn counts(passed: u64, failed: u64, reports: u64) -> Counts {
        Counts {
            passed,
            failed,
            reports,
        }
    }

    fn read(runner: Runner, lines: &[&str]) -> Counts {
        let mut counts = Counts::default();
        for line in lines {
            counts.read(runner, line);
        }
        counts
    }

    #[test]
    fn libtest_summaries_are_added_up() {
        let lines = [
            "running 4 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: FAILED. 2 passed; 5 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ];
        assert_eq!(read(Runner::Libtest, &lines), counts(5, 5, 2));
    }

    #[test]
    fn nextest_summaries_count_every_way_to_fail() {
        let line = "     Summary [   0.012s] 9/12 tests run: 5 passed (1 slow, 1 flaky), 1 failed, 2 timed out, 1 exec failed, 0 skipped";
        assert_eq!(read(Runner::Nextest, &[line]), counts(5, 4, 1));
    }

    #[test]
    fn pytest_says_it_in_its_closing_line() {
        let lines = [
            "113 passed, 4 warnings in 44.22s",
            "===== 2 failed, 3 passed, 1 error in 63.10s (0:01:03) =====",
            "5 passed in a box",
            "waited in 3s",
        ];
        assert_eq!(read(Runner::Pytest, &lines), counts(116, 3, 2));
    }

    #[test]
    fn a_run_without_tests_is_still_a_report() {
        let line = "     Summary [   0.000s] 0 tests run: 0 passed, 0 skipped";
        assert_eq!(read(Runner::Nextest, &[line]), counts(0, 0, 1));
    }

    #[test]
    fn output_of_failed_tests_is_not_counted() {
        let lines = [
            "    test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            "     Summary [   0.012s] 1 test run: 0 passed, 1 failed, 0 skipped",
        ];
        assert_eq!(read(Runner::Nextest, &lines), counts(0, 1, 1));
    }

    #[test]
    fn other_lines_with_numbers_are_not_reports() {
        let lines = ["7 passed, 0 failed", "Summary of 3 passed"];
        assert_eq!(read(Runner::Nextest, &lines), counts(0, 0, 0));
        assert_eq!(read(Runner::Libtest, &lines), counts(0, 0, 0));
    }
}
