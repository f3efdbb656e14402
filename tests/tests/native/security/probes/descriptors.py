# The inherited descriptors of this process, and whether one of them leads to the canary.
# Argument: the directory's name, to search the descriptors of other processes.
def reaches(name):
    try:
        os.close(os.open("canary", os.O_RDONLY, dir_fd=name))
        return True
    except OSError:
        return False


had = sorted(int(name) for name in os.listdir("/proc/self/fd"))
# The descriptor of the listing is closed by now.
had = [fd for fd in had if os.path.exists(f"/proc/self/fd/{fd}")]
answer("beyond_three", " ".join(str(fd) for fd in had if fd > 2))
answer("reached", sum(reaches(fd) for fd in range(1024)))
found = 0
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                found += os.path.exists(f"/proc/{pid}/fd/{fd}/canary")
        except OSError:
            pass
answer("through_others", found)
