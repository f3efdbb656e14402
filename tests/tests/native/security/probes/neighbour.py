# Arguments: a number, and `leave` to leave marks wherever boxes could share something, or `look`
# for the marks of others.
import glob

number, task = sys.argv[1:]
kinds = ("user", "pid", "mnt", "net", "uts", "ipc", "cgroup")
for kind in kinds:
    answer(kind, os.readlink(f"/proc/self/ns/{kind}"))


if task == "leave":
    for place in ("/tmp", "/dev/shm", "/home/box", "/var/tmp", "/workspace"):
        try:
            open(f"{place}/mark-{number}", "w").close()
        except OSError:
            pass
    # System V memory and message queues, by a key that all of them use.
    answer("shmget", call(29, 0x424F58, 4096, 0o1666) >= 0)
    answer("msgget", call(68, 0x424F58, 0o1666) >= 0)
    keep = [socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 45123))]
    keep[0].bind(b"\0box-mark")
    keep[0].listen()
    # The process that stays keeps these open.
    for listener in keep:
        listener.set_inheritable(True)
    sys.stdout.flush()
    if os.fork() == 0:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.execvp("python3", ["python3", "-Ic", f"import time; MARK = 'mark-{number}'; time.sleep(1000)"])
else:
    marks = []
    for place in ("/tmp", "/dev/shm", "/home/box", "/var/tmp", "/workspace"):
        marks += glob.glob(f"{place}/mark-*")
    answer("files", " ".join(sorted(set(os.path.basename(mark) for mark in marks))))
    seen = set()
    for line in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            text = open(line, errors="replace").read()
        except OSError:
            continue
        if text.startswith("python3\0-Ic\0") and "MARK = " in text:
            seen.add(text.split("'")[1])
    answer("processes", " ".join(sorted(seen)))
    answer("pids", len([name for name in os.listdir("/proc") if name.isdigit()]))
    # Created exclusively: the call fails if it exists already.
    ask("shmget", lambda: call(29, 0x424F58, 4096, 0o3666) >= 0)
    ask("msgget", lambda: call(68, 0x424F58, 0o3666) >= 0)
    ask("abstract", lambda: socket.socket(socket.AF_UNIX).connect(b"\0box-mark"))
    ask("loopback", lambda: socket.create_connection(("127.0.0.1", 45123)) and None)
