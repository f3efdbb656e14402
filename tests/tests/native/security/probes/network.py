# Arguments: a port of the host's loopback, the name of an abstract socket of the host. No packet leaves: a connected UDP socket
# only looks up a route.
port, name = sys.argv[1:]


def route(address, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 53))


ask("loopback", lambda: socket.create_connection(("127.0.0.1", int(port))) and None)
ask("loopback_name", lambda: socket.create_connection(("127.255.255.254", int(port))) and None)
ask("unspecified", lambda: socket.create_connection(("0.0.0.0", int(port))) and None)
ask("mapped", lambda: socket.create_connection(("::ffff:127.0.0.1", int(port))) and None)
ask("abstract", lambda: socket.socket(socket.AF_UNIX).connect(b"\0" + name.encode()))
ask("metadata", lambda: route("169.254.169.254"))
ask("outside", lambda: route("192.0.2.1"))
ask("private", lambda: route("10.0.0.1"))
ask("outside6", lambda: route("2001:db8::1", socket.AF_INET6))
ask("own", lambda: route("127.0.0.1"))
ask("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close())
ask("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close())
answer("listed", name in open("/proc/net/unix").read())
