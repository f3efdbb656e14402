//! Every system call with zero arguments: the results equal the committed table.
//!
//! The table is changed by hand, with a deliberate change of the filter.

use std::fmt::Write as _;

use box_tests::machine::on_each_machine;

use super::{Answers, as_root, inside, outside};

const CALLS: &str = include_str!("probes/calls.py");
/// Lines of `FIRST[-LAST] ANSWER`. `passes` is any result except `EPERM`, `ENOSYS` and
/// `EAFNOSUPPORT`: the kernel has checked the arguments and returned its own error.
const TABLE: &str = include_str!("calls.x86_64.txt");

/// Calls that are left out because of their effect, not because of the filter.
const LEFT_OUT: &[(u32, &str)] = &[
    (15, "rt_sigreturn: ends a caller without a signal"),
    (23, "select: waits for ever"),
    (34, "pause: waits for ever"),
    (56, "clone: a second child goes on with the probe"),
    (57, "fork: the same"),
    (58, "vfork: the same"),
    (60, "exit: ends the child"),
    (231, "exit_group: ends the child"),
    (270, "pselect6: waits for ever"),
    (271, "ppoll: waits for ever"),
    (
        335,
        "uretprobe: kernels since 6.14 let it past every filter; see below",
    ),
    (336, "uprobe: the same"),
];

/// Calls that pass and concern user or group 0: fchown, setuid, setgid, setreuid, setregid,
/// setresuid, setresgid. The kernel returns `EPERM`. A box with a single user has no such user, and
/// the kernel returns `EINVAL` there.
const ABOUT_ROOT: &[&str] = &["93", "105", "106", "113", "114", "117", "119"];

/// The answers in the form of the table: neighbours with the same answer share a line.
fn as_table(answers: &Answers) -> String {
    let mut rows: Vec<(u32, u32, &str)> = Vec::new();
    let mut named = String::new();
    let mut numbers: Vec<(u32, &str)> = Vec::new();
    for (name, answer) in answers {
        match name.parse() {
            Ok(number) => numbers.push((number, answer)),
            Err(_) => writeln!(named, "{name} {answer}").unwrap(),
        }
    }
    numbers.sort_unstable();
    for (number, answer) in numbers {
        match rows.last_mut() {
            Some((_, last, same)) if *last + 1 == number && *same == answer => *last = number,
            _ => rows.push((number, number, answer)),
        }
    }
    let mut table = String::new();
    for (first, last, answer) in rows {
        if first == last {
            writeln!(table, "{first} {answer}").unwrap();
        } else {
            writeln!(table, "{first}-{last} {answer}").unwrap();
        }
    }
    table + &named
}

#[tokio::test]
async fn every_system_call_answers_as_the_table_says() {
    let left_out: Vec<String> = LEFT_OUT
        .iter()
        .map(|(number, _)| number.to_string())
        .collect();
    let left_out: Vec<&str> = left_out.iter().map(String::as_str).collect();
    on_each_machine(async |machine| {
        let mut said = inside(machine, "calls", CALLS, &left_out).await;
        if machine.lacks("two_uids").await {
            for call in ABOUT_ROOT {
                let answer = said.insert((*call).to_owned(), "EPERM".to_owned());
                assert_eq!(answer.as_deref(), Some("passes"), "{call}");
            }
        }
        assert_eq!(said.len(), 1024 - LEFT_OUT.len() + 4);
        let table = as_table(&said);
        let differs = |a: &str, b: &str| -> Vec<String> {
            let only = a
                .lines()
                .filter(|line| !b.lines().any(|other| other == *line));
            only.map(str::to_owned).collect()
        };
        assert!(
            table == TABLE,
            "{}: here {:?}, in the table {:?}",
            machine.name,
            differs(&table, TABLE),
            differs(TABLE, &table)
        );
    })
    .await;
}

#[test]
fn the_host_answers_some_system_calls_differently() {
    // ptrace, mount (of nothing), setns, unshare (nothing), perf_event_open, open_by_handle_at,
    // userfaultfd, io_uring_setup, fsopen (of nothing), add_key, keyctl, name_to_handle_at; and
    // calls newer than the filter: statmount, listmount.
    let harmless = [
        "101", "165", "308", "298", "304", "323", "425", "430", "248", "250", "303", "457", "458",
    ];
    let mut args = vec!["only"];
    args.extend(harmless);
    let host = outside(CALLS, &args);
    if as_root() {
        for number in harmless {
            assert_eq!(host[number], "passes", "control: {number}");
        }
    }
    let foreign = ["ia32-getpid", "ia32-socketcall", "ia32-keyctl"];
    assert!(
        foreign.iter().any(|name| host[*name] != "SIGSYS"),
        "control: {host:?}"
    );
    let rows: Vec<(&str, &str)> = TABLE
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let table = |number: &str| {
        let wanted: u32 = number.parse().unwrap();
        let holds = |range: &str| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let bounds = first.parse::<u32>().ok().zip(last.parse::<u32>().ok());
            bounds.is_some_and(|(first, last)| (first..=last).contains(&wanted))
        };
        rows.iter().find(|(range, _)| holds(range)).unwrap().1
    };
    for number in harmless {
        assert_ne!(table(number), "passes", "{number} passes in a box");
    }
    assert_eq!((table("1000"), table("39")), ("ENOSYS", "passes"));
}

/// Since 6.14, kernels exempt these two calls from every filter, for their own probes in programs.
/// A direct call has no effect, in a box and outside: the first raises a signal, the second returns
/// an error.
#[tokio::test]
async fn uprobe_calls_that_bypass_the_filter_do_nothing() {
    const PROBE: &str = "
for number in 335, 336:
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.syscall(ctypes.c_long(number), 0, 0, 0) == -1 else 1)
    answer(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
";
    // The negative number of `SIGILL`, or the error that the probe prints.
    let nothing = |said: &Answers| {
        assert!(["-4", "0"].contains(&&*said["335"]), "{said:?}");
        assert_eq!(said["336"], "0", "{said:?}");
    };
    nothing(&outside(PROBE, &[]));
    on_each_machine(async |machine| nothing(&inside(machine, "probes", PROBE, &[]).await)).await;
}
