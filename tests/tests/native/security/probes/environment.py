# Where a word occurs: in the own environment, in those of other processes, in command lines, and
# in any other file of procfs.
word = sys.argv[1].encode()
answer("own", any(word in key + value for key, value in os.environb.items()))
for file in ("environ", "cmdline", "comm", "mountinfo", "maps", "cgroup"):
    hits = read = 0
    for pid in os.listdir("/proc"):
        # This process has it as an argument.
        if not pid.isdigit() or int(pid) in (os.getpid(), os.getppid()):
            continue
        try:
            with open(f"/proc/{pid}/{file}", "rb") as content:
                hits += word in content.read()
            read += 1
        except OSError:
            pass
    answer(file, hits)
    answer(f"{file}_read", read)
