# The visible files of the host. Arguments: a canary outside of every mount, and its directory.
canary, directory = sys.argv[1:]
for path in (
    "/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/machine-id", "/etc/ssh", "/root", "/boot", "/srv", "/media",
    "/sys", "/var/lib", "/var/log", "/var/cache", "/var/run", "/run/lock", "/run/user", "/run/systemd",
    "/var/run/docker.sock", "/run/docker.sock", "/run/containerd", "/run/podman", "/run/dbus", "/tmp/.X11-unix",
    "/run/crio", "/var/run/secrets",
):
    ask(f"there:{path}", lambda: os.stat(path).st_mode and None)
for prefix in ("", "/proc/self/root", f"/proc/{os.getppid()}/root", "/proc/1/root", "/proc/1/cwd", "/proc/self/cwd/../../../..", "/..", "/workspace/../.."):
    ask(f"canary:{prefix}", lambda: open(prefix + canary).read())
ask("beside", lambda: open("../canary").read())


# Everything except the programs, which are the host's on purpose, and the kernel's file systems.
def everywhere(top):
    for where, dirs, names in os.walk(top):
        if where == "/":
            dirs[:] = [name for name in dirs if name not in ("usr", "proc", "bin", "sbin", "lib", "lib64", "lib32")]
        for name in names:
            path = os.path.join(where, name)
            yield path, os.lstat(path).st_mode


top = "/" if os.path.isdir("/run/box") else directory
found = list(everywhere(top))
answer("canaries", sum(path.endswith("/canary") for path, _ in found))
answer("sockets", sum(stat.S_ISSOCK(mode) for _, mode in found))
answer("blocks", sum(stat.S_ISBLK(mode) for _, mode in found))
answer("home", " ".join(os.listdir("/home")))
# `..` leads to the root and no further.
for _ in range(64):
    os.chdir("..")
answer("top", os.getcwd() == "/" and os.path.samestat(os.stat("."), os.stat("/")))
answer("top_has", os.path.exists("run/box"))
