# The mounts that lack a required flag, and the types of all file systems.
everything = list(mounts())
answer("suid", " ".join(sorted(place for place, options, _ in everything if "nosuid" not in options)))
answer("devices", " ".join(sorted(place for place, options, _ in everything if "nodev" not in options)))
kinds = {kind for _, _, kind in everything}
answer("cgroup", any(kind.startswith("cgroup") for kind in kinds))
answer("sysfs", "sysfs" in kinds)
answer("mounts", len(everything) > 5)
