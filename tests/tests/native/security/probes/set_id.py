# Every way to leave a set-id file, a device or a file with capabilities in this directory.
at, mode = -100, 0o6755


def make(name):
    with open(name, "w"):
        pass
    return name.encode()


kept = []


def pointer(name):
    kept.append(ctypes.c_char_p(name))
    return ctypes.cast(kept[-1], ctypes.c_void_p).value


os.umask(0)
ask("chmod", lambda: os.chmod(make("chmod"), mode))
file = open("fchmod", "w")
ask("fchmod", lambda: os.fchmod(file.fileno(), mode))
ask("fchmodat2", lambda: call(452, at, pointer(make("fchmodat2")), mode, 0))
ask("open", lambda: os.close(os.open("open", os.O_CREAT | os.O_WRONLY, mode)))
ask("creat", lambda: os.close(call(85, pointer(b"creat"), mode)))
ask("mkdir", lambda: call(83, pointer(b"mkdir"), mode))
ask("mknod", lambda: os.mknod("mknod", stat.S_IFREG | mode))
how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, mode, 0)
ask("openat2", lambda: os.close(call(437, at, pointer(b"openat2"), ctypes.addressof(how), 24)))
ask("char_device", lambda: os.mknod("char", stat.S_IFCHR | 0o666, os.makedev(1, 3)))
ask("block_device", lambda: os.mknod("block", stat.S_IFBLK | 0o666, os.makedev(7, 0)))
capabilities = bytes([1, 0, 0, 2, 0, 4, 0, 0]) + bytes(12)
ask("file_capabilities", lambda: os.setxattr(make("capabilities"), "security.capability", capabilities))
ask("overlay_mark", lambda: os.setxattr(make("mark"), "trusted.overlay.opaque", b"y"))
ask("whiteout", lambda: call(316, at, pointer(make("whiteout")), at, pointer(b"moved"), 4))
ask("plain_chmod", lambda: os.chmod(make("plain"), 0o755))
