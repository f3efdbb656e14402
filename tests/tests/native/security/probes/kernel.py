# Opens for writing and writes nothing; reads one byte. Argument: the process to inspect, `1` inside a box.
pid = sys.argv[1]
for path in (
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname",
    "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/proc/sys/fs/binfmt_misc/register",
    "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup", f"/proc/{pid}/oom_score_adj",
    f"/proc/{pid}/mem", f"/proc/{pid}/uid_map", "/dev/kmsg", "/dev/mem", "/dev/kvm", "/proc/irq/default_smp_affinity",
):
    ask(f"write:{path}", lambda: opened(path, os.O_WRONLY))
for path in (
    "/proc/kallsyms", "/proc/keys", "/proc/key-users", "/proc/cmdline", "/proc/config.gz", "/proc/kcore", "/proc/kmsg", "/proc/timer_list",
    "/proc/sched_debug", f"/proc/{pid}/environ", f"/proc/{pid}/maps", f"/proc/{pid}/stack", "/dev/kmsg", "/dev/mem",
    "/sys/kernel/notes", "/sys/class/dmi/id/product_name", "/proc/meminfo",
):
    ask(f"read:{path}", lambda: first_byte(path))
ask("syslog", lambda: call(103, 10, 0, 0))
if "all" in sys.argv:
    writable = 0
    for where, _, names in os.walk("/proc/sys"):
        for name in names:
            try:
                opened(os.path.join(where, name), os.O_WRONLY | os.O_NONBLOCK)
                writable += 1
            except OSError:
                pass
    answer("writable_settings", writable)
