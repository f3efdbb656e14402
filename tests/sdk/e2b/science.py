"""A template with packages of this environment, with which boxes share the version of Python."""

import importlib.metadata
import os
import pathlib
import re
import shutil

from e2b import Template

# Tests of packages are half of their size.
UNUSED = shutil.ignore_patterns("tests", "__pycache__")


def distributions(*names: str) -> set[str]:
    """Returns distributions and all that they need here."""
    found, waiting = set(), list(names)
    while waiting:
        name = re.match(r"[\w.-]+", waiting.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needed = importlib.metadata.requires(name) or []
            waiting.extend(one for one in needed if not re.search("extra ==|sys_platform ==", one))
    return found


def tops(names: set[str]):
    """Returns the folders and modules of distributions."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        parts = {file.parts[0] for file in distribution.files or []}
        for part in parts:
            if not part.startswith("..") and not part.endswith((".dist-info", "__pycache__")):
                yield pathlib.Path(str(distribution.locate_file(part)))


def template(directory: pathlib.Path, *packages: str) -> str:
    """Builds a template with packages, and returns its name."""
    for top in tops(distributions(*packages)):
        target = directory / "packages" / top.name
        if top.is_dir():
            shutil.copytree(top, target, ignore=UNUSED, symlinks=True)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(top, target)
    name = f"science-{os.getpid()}"
    steps = Template(file_context_path=str(directory)).from_base_image().copy("packages", "/home/user/packages")
    Template.build(steps.set_envs({"PYTHONPATH": "/home/user/packages"}), name, memory_mb=2048)
    shutil.rmtree(directory / "packages")
    return name
