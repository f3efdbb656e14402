//! Boxes leave nothing behind, also after a killed client or server.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::support::resources::{
    children, descriptors, exists, groups, is_running, members, namespaces, parent_exists, root_of,
};
use crate::support::{InitClient, is_own_process, run_in_own_process, server_starters};
use box_sys::{Cgroups, Sandbox, SandboxPlan, ServerConfig, receive, send, socket_pair};
use box_test_wait::blocking::eventually;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};

/// Uses a cgroup parent of this test only.
fn config(name: &str) -> ServerConfig {
    ServerConfig {
        cgroup_parent: format!("box-test-{name}-{}", std::process::id()),
        ..ServerConfig::default()
    }
}

fn not_owned() -> SandboxPlan {
    SandboxPlan {
        owned: false,
        ..SandboxPlan::default()
    }
}

fn kill(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

#[test]
fn five_hundred_boxes_leave_nothing() {
    run_in_own_process("cleanup::create_five_hundred");
}

#[test]
#[ignore = "run by five_hundred_boxes_leave_nothing, in a separate process"]
fn create_five_hundred() {
    if !is_own_process() {
        return;
    }
    let config = config("cycles");
    let temporary = || fs::read_dir(std::env::temp_dir()).unwrap().count();
    for (name, start) in server_starters() {
        let server = start(&config);
        let (pid, spares) = (server.pid(), config.spares);
        let boxed = || {
            let (near, far) = socket_pair().unwrap();
            let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
            (sandbox.unwrap(), InitClient::new(near))
        };
        let cycle = |n: usize| {
            let (sandbox, client) = boxed();
            // Some boxes end with a daemon in them.
            let argv = ["/bin/sh", "-c", "sleep 1000 & true"];
            let argv = if n.is_multiple_of(10) {
                &argv[..]
            } else {
                &["true"]
            };
            assert_eq!(client.run(argv).code, Some(0));
            sandbox.destroy().unwrap();
        };
        // An ordinary user's server has left the host's network namespace, so it has one more.
        let nets = config.pool + spares + usize::from(!server.primitives().privileged);
        let wait_until_idle = || {
            // Twice: the second pass covers boxes that ended after the first.
            for _ in 0..2 {
                server.settle().unwrap();
                eventually("the pools are full, and spares wait", || {
                    let fds = descriptors(pid);
                    let many = |kind: &str| fds.get(kind).copied().unwrap_or(0);
                    let full = many("net") == config.pool + 1 && many("user") == config.pool + 1;
                    let begun = namespaces(pid).get("net") == Some(&nets);
                    full && begun && many("socket") == 1 + spares && children(pid).len() == spares
                });
            }
        };
        let snapshot = || {
            let client = descriptors(std::process::id());
            let mut held = descriptors(pid);
            // The overlays in the pool, and those of spares that took them from the pool.
            let (overlays, roots) = (held.remove("/usr"), held.remove("/"));
            assert!(
                overlays <= Some(config.pool + spares),
                "{name}: {overlays:?}"
            );
            assert!(roots <= Some(8 + config.pool + spares), "{name}: {roots:?}");
            (namespaces(pid), held, client, root_of(pid))
        };
        cycle(0);
        wait_until_idle();
        let before = snapshot();
        let (mounts, files) = (
            fs::read_to_string("/proc/self/mountinfo").unwrap(),
            temporary(),
        );

        let (alive, client) = boxed();
        eventually("control: a new spare replaces the used one", || {
            children(pid).len() == spares + 1
        });
        let (with, without) = (snapshot(), &before);
        assert_ne!(with.0, without.0, "{name}: control: namespaces are seen");
        assert_ne!(with.2, without.2, "{name}: control: descriptors are seen");
        assert!(
            alive.cgroup().is_none() || members(&config.cgroup_parent).contains(&alive.pid()),
            "control: also by its cgroup"
        );
        drop(client);
        alive.destroy().unwrap();

        (0..500).for_each(cycle);
        wait_until_idle();
        assert_eq!(snapshot(), before, "{name}: as before");
        let now = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert_eq!(now, mounts, "{name}: no mount");
        assert_eq!(temporary(), files, "{name}: no temporary file");
        // Up to twice the pool size, plus those of the spares and the one that holds the parent.
        let names: BTreeSet<String> = groups(&config.cgroup_parent)
            .iter()
            .map(|path| path.rsplit('/').next().unwrap().to_owned())
            .collect();
        assert!(
            names.len() <= 2 * config.pool + spares + 1,
            "{name}: {names:?}"
        );
        let ends: Vec<u32> = children(pid);
        drop(server);
        assert!(!ends.into_iter().chain([pid]).any(exists), "no process");
        assert!(!parent_exists(&config.cgroup_parent), "no cgroup");
    }
}

/// The pids in a report of the client.
fn pids_in(value: &Value) -> Vec<u32> {
    let pids = value.as_array().unwrap().iter();
    pids.map(|pid| u32::try_from(pid.as_u64().unwrap()).unwrap())
        .collect()
}

/// The client of [`boxes_of_a_killed_client_end`].
///
/// It creates boxes with the received descriptors, reports them, and waits.
#[test]
#[ignore = "run by boxes_of_a_killed_client_end, and killed by it"]
fn client() {
    if !is_own_process() {
        return;
    }
    let stdin = std::io::stdin();
    let mut buffer = [0; 4096];
    let (length, fds) = receive(stdin.as_fd(), &mut buffer).unwrap().unwrap();
    let which = std::str::from_utf8(&buffer[..length]).unwrap().to_owned();
    let (user, parent) = which.split_once(' ').unwrap();
    let config = ServerConfig {
        cgroup_parent: parent.into(),
        ..ServerConfig::default()
    };
    let (_, start) = server_starters()
        .into_iter()
        .find(|(name, _)| *name == user)
        .unwrap();
    let server = start(&config);
    let boxed = |plan: &SandboxPlan, fd: BorrowedFd<'_>| server.create(plan, &[fd], &[]).unwrap();
    let owned: Vec<Sandbox> = (0..4)
        .map(|_| boxed(&SandboxPlan::default(), fds[0].as_fd()))
        .collect();
    let free = boxed(&not_owned(), fds[1].as_fd());
    // A frozen box must end as well.
    let _ = owned[0].freeze();
    drop(fds);
    eventually("spares", || {
        children(server.pid()).len() == owned.len() + 1 + config.spares
    });
    let pids: Vec<i32> = owned.iter().map(Sandbox::pid).collect();
    let facts = json!({
        "server": server.pid(), "owned": pids, "free": free.pid(), "cgroup": free.cgroup(),
        "children": children(server.pid()),
    });
    send(stdin.as_fd(), facts.to_string().as_bytes(), &[]).unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn boxes_of_a_killed_client_end() {
    for (name, _) in server_starters() {
        let parent = config("client").cgroup_parent;
        let (near, far) = socket_pair().unwrap();
        // These stay open, so that no box ends because its connection closes.
        let (_owned_control, owned_far) = socket_pair().unwrap();
        let (free_control, free_far) = socket_pair().unwrap();
        let mut client = Command::new(std::env::current_exe().unwrap())
            .process_group(0)
            .args(["--exact", "cleanup::client", "--ignored"])
            .env(crate::support::OWN_PROCESS, "1")
            .stdin(far)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let start = format!("{name} {parent}");
        send(
            near.as_fd(),
            start.as_bytes(),
            &[owned_far.as_fd(), free_far.as_fd()],
        )
        .unwrap();
        drop((owned_far, free_far));
        let mut buffer = [0; 4096];
        let (length, _) = receive(near.as_fd(), &mut buffer)
            .unwrap()
            .expect("a client");
        let facts: Value = serde_json::from_slice(&buffer[..length]).unwrap();
        let (owned, all) = (pids_in(&facts["owned"]), pids_in(&facts["children"]));
        let server = u32::try_from(facts["server"].as_u64().unwrap()).unwrap();
        let free = u32::try_from(facts["free"].as_u64().unwrap()).unwrap();
        assert!(
            owned.iter().all(|pid| all.contains(pid) && is_running(pid)) && all.contains(&free),
            "{name}: control: they run, and are children of the server"
        );
        // The whole process group, as a terminal or a supervisor does.
        let group = Pid::from_raw(i32::try_from(client.id()).unwrap()).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
        client.wait().unwrap();
        // The spares end as well.
        eventually("server, owned boxes and spares have ended", || {
            !is_running(server) && !all.iter().any(|pid| *pid != free && is_running(pid))
        });
        let client = InitClient::new(free_control);
        assert_eq!(
            client.sh("echo alive").out,
            "alive\n",
            "{name}: the other box runs"
        );
        let left = groups(&parent);
        match facts["cgroup"].as_str() {
            Some(own) => assert!(
                !left.is_empty() && left.iter().all(|group| group.ends_with(own)),
                "only its own cgroup is left: {left:?}"
            ),
            None => assert!(left.is_empty(), "{left:?}"),
        }
        drop(client);
        eventually("the other box ends when its connection closes", || {
            !is_running(free)
        });
        let cgroups = Cgroups::open(&parent);
        cgroups.sweep();
        cgroups.close();
        assert!(!parent_exists(&parent), "{name}: no cgroup");
    }
}

/// A message is truncated if the server cannot open its descriptors.
#[test]
fn a_truncated_message_ends_no_box() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
    // The test cannot set the limit of another user's server.
    if let Some((name, start)) = server_starters().into_iter().next() {
        let server = start(&ServerConfig::default());
        let (near, far) = socket_pair().unwrap();
        let boxed = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
        let boxed = boxed.unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", boxed.pid())).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        let pid: i32 = parent.unwrap().trim().parse().unwrap();
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = |current| {
            let new = Rlimit { current, maximum };
            prlimit(Pid::from_raw(pid), Resource::Nofile, new).unwrap();
        };
        limit(Some(3));
        let refused = server.create(&SandboxPlan::default(), &[near.as_fd()], &[]);
        assert!(
            refused.is_err(),
            "{name}: control: the server cannot open descriptors"
        );
        limit(maximum);
        let again = server.create(&SandboxPlan::default(), &[near.as_fd()], &[]);
        assert!(again.is_ok(), "{name}: {again:?}");
        assert!(
            std::path::Path::new(&format!("/proc/{}/root", boxed.pid())).exists(),
            "{name}: the first box runs"
        );
    }
}

#[test]
fn owned_boxes_of_a_killed_server_end_and_others_continue() {
    for (name, start) in server_starters() {
        let config = config("server");
        let server = start(&config);
        let (owned_control, owned_far) = socket_pair().unwrap();
        let (free_control, free_far) = socket_pair().unwrap();
        let create = |plan: &SandboxPlan, fd: BorrowedFd<'_>| server.create(plan, &[fd], &[]);
        let owned = create(&SandboxPlan::default(), owned_far.as_fd()).unwrap();
        let free = create(&not_owned(), free_far.as_fd()).unwrap();
        drop((owned_far, free_far));
        let (owned_client, free_client) = (
            InitClient::new(owned_control),
            InitClient::new(free_control),
        );
        assert_eq!(owned_client.sh("echo alive").out, "alive\n", "control");
        eventually("spares", || {
            children(server.pid()).len() == 2 + config.spares
        });
        let all = children(server.pid());
        kill(server.pid());
        assert!(owned.wait(Some(box_test_wait::LONG)).unwrap(), "{name}");
        let free_pid = u32::try_from(free.pid()).unwrap();
        eventually("all processes except the other box have ended", || {
            !all.iter().any(|pid| *pid != free_pid && is_running(pid))
        });
        assert_eq!(free_client.sh("echo alive").out, "alive\n", "{name}");
        let error = server.create(&SandboxPlan::default(), &[], &[]);
        assert!(error.is_err(), "{name}: the server creates no boxes");

        // The next server removes the cgroups of this one, except those with a running box. The
        // test has not reaped this server yet.
        let next = start(&config);
        let dead = format!("/b{}-", server.pid());
        let of_dead = || {
            let mut all = groups(&config.cgroup_parent);
            all.retain(|group| group.contains(&dead));
            all
        };
        let own = free.cgroup().map(str::to_owned);
        assert!(
            of_dead()
                .iter()
                .all(|group| own.as_deref().is_some_and(|own| group.ends_with(own))),
            "{name}: {:?}",
            of_dead()
        );
        assert_eq!(of_dead().is_empty(), own.is_none(), "{name}");

        // Adopt the box from its record, end it, and sweep its cgroups.
        let record = free.record();
        let (pidfd, mounts) = (
            free.pidfd().try_clone_to_owned().unwrap(),
            free.mount_namespace().try_clone_to_owned().unwrap(),
        );
        let cgroups = std::sync::Arc::new(Cgroups::open(&config.cgroup_parent));
        let adopted = Sandbox::adopt(pidfd, mounts, None, Vec::new(), record, cgroups.clone());
        adopted.destroy().unwrap();
        eventually("swept", || {
            cgroups.sweep();
            of_dead().is_empty()
        });
        drop((next, server));
        assert!(!parent_exists(&config.cgroup_parent), "{name}: no cgroup");
    }
}

#[test]
fn a_server_killed_during_creation_leaves_no_owned_box() {
    let config = config("work");
    let (_, start) = server_starters().remove(0);
    let server = start(&config);
    if !server.primitives().cgroup_missing.is_empty() {
        // Without cgroups, the test cannot find orphans of a server.
        return;
    }
    // Stays open, so that no box ends because its connection closes.
    let (_near, far) = socket_pair().unwrap();
    let made = std::thread::scope(|scope| {
        let work = || {
            let mut made = 0;
            while let Ok(sandbox) = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]) {
                // Leaked on purpose: the box must end with its server.
                std::mem::forget(sandbox);
                made += 1;
            }
            made
        };
        let threads = [(); 4].map(|()| scope.spawn(work));
        eventually("boxes", || members(&config.cgroup_parent).len() > 20);
        kill(server.pid());
        threads
            .map(|thread| thread.join().unwrap())
            .iter()
            .sum::<usize>()
    });
    assert!(made > 10, "control: {made} boxes were made");
    eventually("no box runs", || members(&config.cgroup_parent).is_empty());
    let cgroups = Cgroups::open(&config.cgroup_parent);
    drop(server);
    cgroups.sweep();
    cgroups.close();
    assert!(!parent_exists(&config.cgroup_parent), "no cgroup");
}
