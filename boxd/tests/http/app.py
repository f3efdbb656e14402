import base64, hashlib, http.server, json, sys, threading
class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def respond(self, body, **headers):
        body = body.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items(): self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
            self.end_headers()
            self.wfile.flush()
            while data := self.connection.recv(65536): self.connection.sendall(data)
            self.close_connection = True
        elif self.path.startswith("/bytes/"):
            count = int(self.path.split("/")[2])
            self.send_response(200)
            self.send_header("Content-Length", str(count))
            self.end_headers()
            while count > 0:
                self.wfile.write(b"x" * min(count, 65536)); count -= 65536
        else:
            self.respond(json.dumps({"path": self.path, "headers": dict(self.headers)}), Set_Cookie="all=1; Path=/")
    def do_POST(self):
        count = 0
        if "Content-Length" in self.headers:
            left = int(self.headers["Content-Length"])
            while left > 0:
                got = len(self.rfile.read(min(left, 65536)))
                if got == 0: break
                left -= got; count += got
        else:
            while size := int(self.rfile.readline().strip() or b"0", 16):
                count += len(self.rfile.read(size)); self.rfile.readline()
        self.respond(str(count))
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), App).serve_forever()
