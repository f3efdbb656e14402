# Fills the box's private storage in one way, far beyond its limit, and prints how much it wrote.
way, place = sys.argv[1:]
block = bytes(1 << 20)
kept = []


def write(path, megabytes, hidden=False):
    file = open(path, "wb", buffering=0)
    kept.append(file)
    if hidden:
        os.unlink(path)
    for done in range(megabytes):
        written = file.write(block)
        if written < len(block):
            raise OSError(errno.ENOSPC, f"after {done}")


def bytes_of_many_files():
    for n in range(100):
        write(f"{place}/many-{n}", 8)


def deleted_but_open():
    for n in range(100):
        write(f"{place}/hidden-{n}", 8, hidden=True)


def files():
    for n in range(70_000):
        os.mknod(f"{place}/f{n}")


def sparse():
    with open(f"{place}/sparse", "wb") as file:
        file.truncate(1 << 40)


def memory_file():
    memory = os.memfd_create("probe")
    for _ in range(256):
        os.write(memory, block)


def threads():
    import threading
    wait = threading.Event()
    started = []
    threading.stack_size(65536)
    try:
        for _ in range(200):
            thread = threading.Thread(target=wait.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        answer("stopped_at", len(started))
    wait.set()
    if len(started) < 200:
        raise OSError(errno.EAGAIN, "no more threads")


ways = {
    "one_file": lambda: write(f"{place}/one", 800),
    "many": bytes_of_many_files,
    "hidden": deleted_but_open,
    "files": files,
    "sparse": sparse,
    "memory_file": memory_file,
    "threads": threads,
}
ask("filled", ways[way])
