//! Many boxes at once: from many threads, and from several servers.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::support::resources::parent_exists;
use crate::support::{InitClient, SERVERS, is_own_process, run_in_own_process, server_starters};
use box_sys::{Sandbox, SandboxPlan, ServerConfig, socket_pair};

#[test]
fn sixty_four_threads_each_get_a_separate_box() {
    const THREADS: usize = 64;
    for server in SERVERS.iter() {
        let together = Barrier::new(THREADS);
        let one = |n: usize| {
            together.wait();
            let boxed = server.create_box(&SandboxPlan::default());
            let output = boxed.sh(&format!("echo {n} > /tmp/n; cat /tmp/n")).out;
            // All boxes run at once.
            together.wait();
            let sandbox = boxed.sandbox();
            let seen = (sandbox.pid(), sandbox.cgroup().map(str::to_owned));
            let alive = !sandbox.wait(Some(Duration::ZERO)).unwrap();
            assert!(alive, "{}: {n} runs", server.name);
            assert_eq!(output, format!("{n}\n"), "{}", server.name);
            assert_eq!(boxed.sh("cat /tmp/n").out, output, "still private");
            seen
        };
        let one = &one;
        let seen: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || one(n))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let pids: BTreeSet<i32> = seen.iter().map(|(pid, _)| *pid).collect();
        assert_eq!(pids.len(), THREADS, "{}", server.name);
        let groups: BTreeSet<&String> = seen
            .iter()
            .filter_map(|(_, group)| group.as_ref())
            .collect();
        assert_eq!(
            groups.len(),
            if server.has("cgroup.pids") {
                THREADS
            } else {
                0
            }
        );
    }
}

#[test]
fn servers_can_share_a_cgroup_parent() {
    let config = ServerConfig {
        cgroup_parent: format!("box-test-many-{}", std::process::id()),
        pool: 1,
        spares: 1,
        ..ServerConfig::default()
    };
    let (_, start) = server_starters().remove(0);
    // Short runs at different times: often one server is the last to leave while another starts.
    let (_near, far) = socket_pair().unwrap();
    std::thread::scope(|scope| {
        for n in 0..6 {
            let (config, start, far) = (&config, &start, far.as_fd());
            scope.spawn(move || {
                for round in 0..8 {
                    let server = start(config);
                    let sandbox = server.create(&SandboxPlan::default(), &[far], &[]);
                    let sandbox = sandbox.unwrap_or_else(|error| panic!("{n}.{round}: {error}"));
                    assert_eq!(
                        sandbox.cgroup().is_some(),
                        server.primitives().cgroup_missing.len() < 5,
                        "with its cgroups"
                    );
                    sandbox.destroy().unwrap();
                }
            });
        }
    });
    assert!(!parent_exists(&config.cgroup_parent), "the last removed it");
}

#[test]
fn a_thousand_boxes_run_at_once() {
    run_in_own_process("many_boxes::create_thousand");
}

#[test]
#[ignore = "run by a_thousand_boxes_run_at_once, in a separate process"]
fn create_thousand() {
    if !is_own_process() {
        return;
    }
    crate::support::raise_descriptor_limit();
    // The cost of a box does not depend on the user, so fewer boxes are enough for the second one.
    for ((name, start), boxes) in server_starters().into_iter().zip([1000, 200]) {
        let server = start(&ServerConfig::default());
        let boxed = || {
            let (near, far) = socket_pair().unwrap();
            let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
            (sandbox.unwrap(), InitClient::new(near))
        };
        let first = boxed();
        let began = Instant::now();
        let mut all = vec![first];
        let some = || (0..boxes / 4).map(|_| boxed()).collect::<Vec<_>>();
        std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(some));
            let made = threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap());
            all.extend(made);
        });
        let made = began.elapsed();
        let ended =
            |(sandbox, _): &&(Sandbox, InitClient)| sandbox.wait(Some(Duration::ZERO)).unwrap();
        assert_eq!(all.iter().filter(ended).count(), 0, "{name}: all run");
        let pids: BTreeSet<i32> = all.iter().map(|(sandbox, _)| sandbox.pid()).collect();
        assert_eq!(pids.len(), boxes + 1, "{name}");
        for client in [&all[0].1, &all[boxes].1] {
            assert_eq!(client.run(&["/bin/true"]).code, Some(0), "{name}");
        }
        println!("{name}: {boxes} made in {made:?}");
        for (sandbox, _) in &all {
            sandbox.kill().unwrap();
        }
        for (sandbox, _) in &all {
            let end = sandbox.wait(Some(box_test_wait::LONG)).unwrap();
            assert!(end, "{name}: all end");
        }
        drop(all);
        server.settle().unwrap();
    }
}
