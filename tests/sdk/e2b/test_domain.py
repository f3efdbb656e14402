"""`E2B_DOMAIN` alone: the SDKs reach the server by its host names, through a proxy that ends their TLS."""

import pathlib
import re
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from conftest import TOKEN
from program import environment


def key_of(certificate: pathlib.Path) -> pathlib.Path:
    return certificate.with_suffix(".key")


def certify(certificate: pathlib.Path, *options) -> None:
    common = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    files = ["-subj", f"/CN={certificate.stem}", "-keyout", key_of(certificate), "-out", certificate]
    subprocess.run([*common, *files, *options], check=True, capture_output=True)


class Proxy:
    """A proxy with a wildcard certificate, configured as docs/e2b.md describes."""

    def __init__(self, folder: pathlib.Path):
        self.authority = folder / "authority.pem"
        certify(self.authority, "-addext", "basicConstraints=critical,CA:TRUE")
        certificate = folder / "certificate.pem"
        names = ["-addext", "subjectAltName=DNS:*.box.localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
        certify(certificate, "-CA", self.authority, "-CAkey", key_of(self.authority), *names)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key_of(certificate))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.target = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=[client], daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        """Passes one request with its `Host` header, so that each has a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.target)) as server:
            try:
                client = self.context.wrap_socket(client, server_side=True)
                head = b""
                while b"\r\n\r\n" not in head:
                    piece = client.recv(65536)
                    if not piece:
                        return
                    head += piece
                line, rest = head.split(b"\r\n", 1)
                rest = re.sub(rb"(?im)^connection: *keep-alive\r\n", b"", rest)
                server.sendall(line + b"\r\nX-Forwarded-Proto: https\r\nConnection: close\r\n" + rest)
                back = threading.Thread(target=self.relay, args=[server, client], daemon=True)
                back.start()
                self.relay(client, server)
                back.join()
            except OSError:
                pass
            finally:
                client.close()

    def relay(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                target.sendall(piece)
        except OSError:
            pass
        finally:
            try:
                target.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@pytest.fixture
def proxy(tmp_path):
    proxy = Proxy(tmp_path)
    yield proxy
    proxy.listener.close()


def test_the_sdks_need_only_the_domain(own_server, proxy):
    domain = f"box.localhost:{proxy.port}"
    server = own_server(env={"BOXD_SERVER_BOX_DOMAIN": domain})
    proxy.target = server.port
    client = pathlib.Path(__file__).parent / "domain_client.py"
    env = environment(E2B_DOMAIN=domain, E2B_API_KEY=TOKEN, SSL_CERT_FILE=str(proxy.authority))
    for name in ["E2B_API_URL", "E2B_SANDBOX_URL"]:
        env.pop(name, None)
    ran = subprocess.run([sys.executable, client], env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "done"
