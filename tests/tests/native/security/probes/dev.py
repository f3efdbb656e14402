# The devices by their numbers, and whether they can be replaced.
nodes = {}
for name in sorted(os.listdir("/dev")):
    mode = os.lstat(f"/dev/{name}")
    if stat.S_ISCHR(mode.st_mode) or stat.S_ISBLK(mode.st_mode):
        nodes[name] = f"{os.major(mode.st_rdev)}:{os.minor(mode.st_rdev)}"
answer("nodes", " ".join(f"{name}={number}" for name, number in nodes.items()))
answer("read_only", bool(os.statvfs("/dev").f_flag & os.ST_RDONLY))
answer("writable", os.access("/dev", os.W_OK))
if sys.argv[1:] == ["change"]:
    ask("make", lambda: opened("/dev/x", os.O_CREAT | os.O_WRONLY))
    ask("unlink", lambda: os.unlink("/dev/null"))
    ask("rename", lambda: os.rename("/dev/zero", "/dev/null"))
    ask("link", lambda: os.symlink("/etc/passwd", "/dev/console"))
    ask("mount", lambda: call(165, 0, 0, 0, 4096, 0))
with open("/dev/null", "r+b", buffering=0) as null:
    null.write(b"x")
    answer("null_is_empty", null.read(1) == b"")
