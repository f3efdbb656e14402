//! Nothing is left of boxes: not after hundreds of them, not after a client or a server was killed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use box_sys::{Cgroups, Sandbox, SandboxPlan, ServerConfig, receive, send, socket_pair};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use support::census::{
    children, descriptors, exists, groups, lives, members, namespaces, parent_exists, root_of,
};
use support::{Talk, again_alone, alone, eventually, servers};

/// A parent for cgroups that no other test uses at the same time.
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
    again_alone("cycles");
}

#[test]
#[ignore = "run by five_hundred_boxes_leave_nothing, in a process of its own"]
fn cycles() {
    if !alone() {
        return;
    }
    let config = config("cycles");
    let temporary = || fs::read_dir(std::env::temp_dir()).unwrap().count();
    for (name, start) in servers() {
        let server = start(&config);
        let (pid, spares) = (server.pid(), config.spares);
        let boxed = || {
            let (near, far) = socket_pair().unwrap();
            let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
            (sandbox.unwrap(), Talk::new(near))
        };
        let cycle = |n: usize| {
            let (sandbox, talk) = boxed();
            // Some end with a daemon in them, as boxes do.
            let argv = ["/bin/sh", "-c", "sleep 1000 & true"];
            let argv = if n.is_multiple_of(10) {
                &argv[..]
            } else {
                &["true"]
            };
            assert_eq!(talk.run(argv).code, Some(0));
            sandbox.destroy().unwrap();
        };
        // An ordinary user's server has left the machine's network, so it has one more that is not ours.
        let nets = config.pool + spares + usize::from(!server.primitives().privileged);
        let calm = || {
            // Twice: the second time also for boxes that the server has seen end since the first.
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
        let look = || {
            let client = descriptors(std::process::id());
            let mut held = descriptors(pid);
            // The overlays in the pool, and of those spares that did not make their own.
            let (views, roots) = (held.remove("/usr"), held.remove("/"));
            assert!(views <= Some(config.pool + spares), "{name}: {views:?}");
            assert!(roots <= Some(8 + config.pool + spares), "{name}: {roots:?}");
            (namespaces(pid), held, client, root_of(pid))
        };
        cycle(0);
        calm();
        let before = look();
        let (mounts, files) = (
            fs::read_to_string("/proc/self/mountinfo").unwrap(),
            temporary(),
        );

        let (alive, talk) = boxed();
        eventually(
            "control: the spare that became a box is made up for",
            || children(pid).len() == spares + 1,
        );
        let (with, without) = (look(), &before);
        assert_ne!(with.0, without.0, "{name}: control: namespaces are seen");
        assert_ne!(with.2, without.2, "{name}: control: descriptors are seen");
        assert!(
            alive.cgroup().is_none() || members(&config.cgroup_parent).contains(&alive.pid()),
            "control: also by its cgroup"
        );
        drop(talk);
        alive.destroy().unwrap();

        (0..500).for_each(cycle);
        calm();
        assert_eq!(look(), before, "{name}: as before");
        let now = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert_eq!(now, mounts, "{name}: no mount");
        assert_eq!(temporary(), files, "{name}: no temporary file");
        // Besides those in the pools, which may be twice its size, there are the spares' and the one that holds the parent.
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

/// What a client that is about to be killed tells.
fn told(value: &Value) -> Vec<u32> {
    let pids = value.as_array().unwrap().iter();
    pids.map(|pid| u32::try_from(pid.as_u64().unwrap()).unwrap())
        .collect()
}

/// A client for [`a_killed_client_takes_its_boxes_with_it`]: makes boxes with the descriptors it is sent, tells of them, waits.
#[test]
#[ignore = "run by a_killed_client_takes_its_boxes_with_it, and killed by it"]
fn client() {
    if !alone() {
        return;
    }
    let stdin = std::io::stdin();
    let mut buffer = [0; 4096];
    let (length, fds) = receive(stdin.as_fd(), &mut buffer).unwrap().unwrap();
    let which = std::str::from_utf8(&buffer[..length]).unwrap().to_owned();
    let (as_whom, parent) = which.split_once(' ').unwrap();
    let config = ServerConfig {
        cgroup_parent: parent.into(),
        ..ServerConfig::default()
    };
    let (_, start) = servers()
        .into_iter()
        .find(|(name, _)| *name == as_whom)
        .unwrap();
    let server = start(&config);
    let boxed = |plan: &SandboxPlan, fd: BorrowedFd<'_>| server.create(plan, &[fd], &[]).unwrap();
    let owned: Vec<Sandbox> = (0..4)
        .map(|_| boxed(&SandboxPlan::default(), fds[0].as_fd()))
        .collect();
    let free = boxed(&not_owned(), fds[1].as_fd());
    // One that cannot run shall end like the others.
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
fn a_killed_client_takes_its_boxes_with_it() {
    for (name, _) in servers() {
        let parent = config("client").cgroup_parent;
        let (near, far) = socket_pair().unwrap();
        // These stay open here: no box ends because nobody speaks to it.
        let (_owned_control, owned_far) = socket_pair().unwrap();
        let (free_control, free_far) = socket_pair().unwrap();
        let mut client = Command::new(std::env::current_exe().unwrap())
            .process_group(0)
            .args(["--exact", "client", "--ignored"])
            .env(support::ALONE, "1")
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
        let (owned, all) = (told(&facts["owned"]), told(&facts["children"]));
        let server = u32::try_from(facts["server"].as_u64().unwrap()).unwrap();
        let free = u32::try_from(facts["free"].as_u64().unwrap()).unwrap();
        assert!(
            owned.iter().all(|pid| all.contains(pid) && lives(pid)) && all.contains(&free),
            "{name}: control: they live, and are the server's"
        );
        // With its whole group, as a terminal or a supervisor does.
        let group = Pid::from_raw(i32::try_from(client.id()).unwrap()).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
        client.wait().unwrap();
        // The spares go as well.
        eventually("everything that belonged to it is gone", || {
            !lives(server) && !all.iter().any(|pid| *pid != free && lives(pid))
        });
        let talk = Talk::new(free_control);
        assert_eq!(
            talk.sh("echo alive").out,
            "alive\n",
            "{name}: the other lives"
        );
        let left = groups(&parent);
        match facts["cgroup"].as_str() {
            Some(own) => assert!(
                !left.is_empty() && left.iter().all(|group| group.ends_with(own)),
                "only its own cgroup is left: {left:?}"
            ),
            None => assert!(left.is_empty(), "{left:?}"),
        }
        drop(talk);
        eventually("the other ends when nobody speaks to it", || !lives(free));
        let cgroups = Cgroups::open(&parent);
        cgroups.sweep();
        cgroups.close();
        assert!(!parent_exists(&parent), "{name}: no cgroup");
    }
}

/// Descriptors for which there is no room arrive as a message that was cut.
#[test]
fn a_message_that_was_cut_ends_no_box() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
    // The limit of another user's server is nobody's to set here.
    if let Some((name, start)) = servers().into_iter().next() {
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
        assert!(refused.is_err(), "{name}: control: there is no room");
        limit(maximum);
        let again = server.create(&SandboxPlan::default(), &[near.as_fd()], &[]);
        assert!(again.is_ok(), "{name}: {again:?}");
        assert!(
            std::path::Path::new(&format!("/proc/{}/root", boxed.pid())).exists(),
            "{name}: the first one lives"
        );
    }
}

#[test]
fn a_killed_server_takes_owned_boxes_with_it_and_others_live_on() {
    for (name, start) in servers() {
        let config = config("server");
        let server = start(&config);
        let (owned_control, owned_far) = socket_pair().unwrap();
        let (free_control, free_far) = socket_pair().unwrap();
        let create = |plan: &SandboxPlan, fd: BorrowedFd<'_>| server.create(plan, &[fd], &[]);
        let owned = create(&SandboxPlan::default(), owned_far.as_fd()).unwrap();
        let free = create(&not_owned(), free_far.as_fd()).unwrap();
        drop((owned_far, free_far));
        let (owned_talk, free_talk) = (Talk::new(owned_control), Talk::new(free_control));
        assert_eq!(owned_talk.sh("echo alive").out, "alive\n", "control");
        eventually("spares", || {
            children(server.pid()).len() == 2 + config.spares
        });
        let all = children(server.pid());
        kill(server.pid());
        assert!(owned.wait(Some(support::LONG)).unwrap(), "{name}");
        let free_pid = u32::try_from(free.pid()).unwrap();
        eventually("all but the other are gone", || {
            !all.iter().any(|pid| *pid != free_pid && lives(pid))
        });
        assert_eq!(free_talk.sh("echo alive").out, "alive\n", "{name}");
        let error = server.create(&SandboxPlan::default(), &[], &[]);
        assert!(error.is_err(), "{name}: nobody makes boxes any more");

        // The next server clears away what this one left, which nobody has waited for yet; not what still has a box in it.
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

        // Adopted by what was written down, ended, and its cgroups swept.
        let record = free.record();
        let (pidfd, mounts) = (
            free.pidfd().try_clone_to_owned().unwrap(),
            free.mount_namespace().try_clone_to_owned().unwrap(),
        );
        let cgroups = std::sync::Arc::new(Cgroups::open(&config.cgroup_parent));
        let adopted = Sandbox::adopt(pidfd, mounts, Vec::new(), record, cgroups.clone());
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
fn a_server_killed_at_work_leaves_no_owned_box() {
    let config = config("work");
    let (_, start) = servers().remove(0);
    let server = start(&config);
    if !server.primitives().cgroup_missing.is_empty() {
        // Orphans of a server are only found by their cgroups.
        return;
    }
    // Kept here: what a box has for company is not what ends it.
    let (_near, far) = socket_pair().unwrap();
    let made = std::thread::scope(|scope| {
        let work = || {
            let mut made = 0;
            while let Ok(sandbox) = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]) {
                // Left to live: the server's end must be its end.
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
    eventually("no box is left", || {
        members(&config.cgroup_parent).is_empty()
    });
    let cgroups = Cgroups::open(&config.cgroup_parent);
    drop(server);
    cgroups.sweep();
    cgroups.close();
    assert!(!parent_exists(&config.cgroup_parent), "no cgroup");
}
