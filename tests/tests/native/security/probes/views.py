# Inodes that a box shares with others. First argument: `watch`, `notify`, `lock`, `try`,
# `lease`, `open`, `mounts`, `proc` or `socket`; then paths.
import fcntl, signal, struct, time

IN_OPEN, IN_NONBLOCK = 0x20, 0o4000
task, paths = sys.argv[1], sys.argv[2:]


def add_watch(descriptor, path):
    if libc.inotify_add_watch(descriptor, path.encode(), IN_OPEN) < 0:
        raise OSError(ctypes.get_errno(), path)


def names(data):
    at = 0
    while at < len(data):
        length = struct.unpack_from("iIII", data, at)[3]
        yield data[at + 16:at + 16 + length].rstrip(b"\0").decode() or "-"
        at += 16 + length


def wait_for(name):
    while not os.path.exists(f"{here}/{name}"):
        time.sleep(0.01)


def mark(name):
    open(f"{here}/{name}", "w").close()


if task == "watch":
    # Creates a file when it watches. On request by another file, it prints what it has seen: the
    # names of opened directory entries, and `-` for the watched path itself.
    here, paths = paths[0], paths[1:]
    seen = set()
    watcher = libc.inotify_init1(IN_NONBLOCK)
    for path in paths:
        add_watch(watcher, path)
    mark("ready")
    wait_for("stop")
    try:
        while data := os.read(watcher, 65536):
            seen.update(names(data))
    except BlockingIOError:
        pass
    answer("seen", " ".join(sorted(seen)))
elif task == "notify":
    # The older kind of watch, on one directory: the number of reads of its files before each request.
    here, directory = paths
    seen = 0

    def count(_signal, _frame):
        global seen
        seen += 1

    signal.signal(signal.SIGIO, count)
    watched = os.open(directory, os.O_RDONLY)
    ask("watched", lambda: fcntl.fcntl(watched, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT))
    mark("ready")
    wait_for("others")
    answer("others", seen)
    mark("counted")
    wait_for("stop")
    answer("all", seen)
elif task == "lock":
    here, paths = paths[0], paths[1:]
    held = [os.open(path, os.O_RDONLY) for path in paths]
    for descriptor in held:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    mark("ready")
    wait_for("stop")
    answer("locked", len(held))
elif task == "try":
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        ask(path, lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))
        # The POSIX lock that would block a writer's lock.
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind = struct.unpack_from("h", fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))[0]
        answer(f"posix {path}", {fcntl.F_UNLCK: "none", fcntl.F_RDLCK: "read"}.get(kind, kind))
elif task == "lease":
    here, paths = paths[0], paths[1:]
    # This breaks the lease.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = [os.open(path, os.O_RDONLY) for path in paths]
    for path, descriptor in zip(paths, held):
        ask(path, lambda: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK))
    mark("ready")
    wait_for("stop")
elif task == "open":
    for path in paths:
        ask(path, lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
elif task == "mounts":
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            fields = line.split()
            after = fields.index("-")
            if fields[after + 1] == "overlay":
                layers = [option for option in fields[after + 3].split(",") if option.startswith("lowerdir")]
                answer(fields[4], " ".join(layers))
elif task == "proc":
    # The readable and non-empty files of procfs that belong to no process.
    for name in os.listdir("/proc"):
        path = f"/proc/{name}"
        if name.isdigit() or os.path.islink(path):
            continue
        try:
            if os.path.isdir(path):
                shown = bool(os.listdir(path))
            else:
                with open(path, "rb") as file:
                    shown = bool(file.read(1))
        except OSError:
            shown = False
        answer(name, shown)
elif task == "socket":
    for path in paths:
        ask(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
