"""Debian's registry on this machine, with an image of a few of the machine's programs, for suites with `httpx`."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import tarfile

import httpx
import pytest
from program import free_port
from waiting import eventually

PROGRAMS = "bash cat chmod cp dirname gzip id ls mkdir mktemp mv rm sh sleep stat tar touch"


class Registry:
    """A registry on a free port."""

    def __init__(self, folder: pathlib.Path):
        self.port = free_port()
        config = {
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": f"127.0.0.1:{self.port}"},
            "log": {"level": "error"},
        }
        (folder / "config.yml").write_text(json.dumps(config))
        with (folder / "registry.log").open("wb") as log:
            arguments = ["docker-registry", "serve", folder / "config.yml"]
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log)
        self.client = httpx.Client(base_url=f"http://localhost:{self.port}")
        eventually(self.answers, "the registry answers")

    def answers(self) -> bool:
        assert self.process.poll() is None, "the registry ended"
        try:
            return self.client.get("/v2/").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    def push(self, name: str) -> str:
        """Pushes the image and returns its reference."""
        layer = files()
        settings = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        }
        settings = json.dumps(settings).encode()
        kind = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": self.blob(name, f"{kind}.config.v1+json", settings),
            "layers": [self.blob(name, f"{kind}.layer.v1.tar", layer)],
        }
        put = self.client.put(
            f"/v2/{name}/manifests/latest",
            content=json.dumps(manifest),
            headers={"Content-Type": manifest["mediaType"]},
        )
        assert put.status_code == 201, put.text
        return f"localhost:{self.port}/{name}:latest"

    def blob(self, name: str, kind: str, content: bytes) -> dict:
        begun = self.client.post(f"/v2/{name}/blobs/uploads/")
        location = httpx.URL(begun.headers["location"]).copy_merge_params({"digest": digest(content)})
        put = self.client.put(location, content=content)
        assert put.status_code == 201, put.text
        return {"mediaType": kind, "digest": digest(content), "size": len(content)}


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """The reference of the image `small`; a suite imports this fixture in its `conftest.py`."""
    registry = Registry(tmp_path_factory.mktemp("registry"))
    yield registry.push("small")
    registry.stop()


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def files() -> bytes:
    """Returns a root file system with the programs and their libraries."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ["bin", "etc", "root", "tmp", "usr", "usr/bin", "home"]:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        texts = {
            "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
            "etc/group": "root:x:0:\n",
            "etc/of-the-image": "of the image\n",
        }
        for name, text in texts.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(text), 0o644
            archive.addfile(file, io.BytesIO(text.encode()))
        added = set()
        for program in PROGRAMS.split():
            path = pathlib.Path(shutil.which(program)).resolve()
            listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
            for library in re.findall(r"(/\S+) \(0x", listed):
                if library not in added:
                    added.add(library)
                    add(archive, pathlib.Path(library).resolve(), library.lstrip("/"))
            add(archive, path, f"bin/{program}")
    return packed.getvalue()


def add(archive: tarfile.TarFile, path: pathlib.Path, name: str) -> None:
    file = archive.gettarinfo(path, name)
    file.uid = file.gid = 0
    file.uname = file.gname = "root"
    with path.open("rb") as content:
        archive.addfile(file, content)
