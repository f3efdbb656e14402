"""A server with invalid answers, selected by the path."""
import socket, threading

RESPONSES = {
    b"/nothing": b"",
    b"/garbage": b"this is not HTTP\r\n\r\n" + b"\x00" * 4096,
    b"/switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nrest",
    b"/heads": b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * (1 << 20) + b"\r\n\r\n",
    b"/many": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X%d: x\r\n" % n for n in range(5000)) + b"\r\n",
    b"/lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\nx",
    b"/short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfew",
    b"/two": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none" + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntwo",
    b"/early": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell",
}

def serve(connection):
    with connection:
        request = connection.recv(65536).split(b" ")
        connection.sendall(RESPONSES.get(request[1], b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell"))

listener = socket.create_server(("127.0.0.1", 8000))
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
