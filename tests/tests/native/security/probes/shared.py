# Shared resources that one program can take. The first argument selects one.
import resource, time


def limits():
    core = resource.RLIMIT_CORE
    answer("core", resource.getrlimit(core))
    ask("set_core", lambda: resource.setrlimit(core, (0, 0)))
    answer("core_then", resource.getrlimit(core))
    for name in ("RTPRIO", "NICE", "MEMLOCK", "SIGPENDING"):
        answer(name, resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1])
    fifo = os.sched_param(1)
    ask("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, fifo))


def watchers():
    made = 0
    while made < 100 and libc.inotify_init1(0) >= 0:
        made += 1
    answer("watchers", made)


def score():
    def write(value):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(value)

    ask("raise", lambda: write("1000"))
    ask("lower", lambda: write("500"))
    with open("/proc/self/oom_score_adj") as file:
        answer("score", file.read().strip())


def terminals():
    made = []
    try:
        while len(made) < 200:
            made.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        answer("error", errno.errorcode[error.errno])
    answer("terminals", len(made))


# As many open files as this process can get.
def files():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Python raises its own error for EPERM here.
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
        answer("more", "ok")
    except ValueError:
        answer("more", "EPERM")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = 3
    try:
        while made < 5000:
            os.open("/dev/null", os.O_RDONLY)
            made += 1
    except OSError as error:
        answer("error", errno.errorcode[error.errno])
    answer("files", made)


# The signals that the first process of this box handles, and the threads of a named process whose
# processors can be chosen.
def first():
    with open(f"/proc/{sys.argv[2]}/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    answer("handled", fields["SigCgt"].strip())
    threads = sorted(os.listdir(f"/proc/{sys.argv[2]}/task"))
    answer("threads", len(threads))
    answer("processors", len(os.sched_getaffinity(0)))
    for n, thread in enumerate(threads):
        choose(n, int(thread))
    choose("own", 0)


# Chooses one processor for a thread, prints whether its set is unchanged, and restores it.
def choose(name, thread):
    before = os.sched_getaffinity(thread)
    ask(f"affinity_{name}", lambda: os.sched_setaffinity(thread, {min(before)}))
    answer(f"kept_{name}", os.sched_getaffinity(thread) == before)
    if os.sched_getaffinity(thread) != before:
        os.sched_setaffinity(thread, before)


# Sends as many descriptors as possible, which are never received, and keeps them in flight.
def in_flight():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept, sent = [], 0
    try:
        while True:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            near.setblocking(False)
            kept.append((near, far))
            try:
                while True:
                    socket.send_fds(near, [b"x"], [0] * 253)
                    sent += 253
            except BlockingIOError:
                pass
    except OSError as error:
        answer("in_flight", f"{sent} {errno.errorcode[error.errno]}")
    time.sleep(600)


questions = (limits, watchers, score, terminals, files, first, in_flight)
{question.__name__: question for question in questions}[sys.argv[1]]()
