"""An image, built with buildah over a Debian from debootstrap, and a container of it: no Docker engine is needed.

What differs from `docker build`: the base is Debian instead of Ubuntu (both have glibc, apt and python3), and a
container is a chroot in namespaces of its own instead of what a container engine makes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import ROOT

__all__ = ["Image", "build", "missing"]

SUITE = "bookworm"
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
# Read-only but for /tmp and the volume, the image's user, and process 1 in a namespace of its own.
START = """
set -e
mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"; mount -t tmpfs -o "uid=${2%:*},mode=0755" tmpfs "$1/models"
mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"
root=$1 user=$2; shift 2
exec chroot --userspec="$user" "$root" env -i "$@"
"""


@dataclass
class Image:
    """A built image, unpacked."""

    root: Path
    config: dict[str, Any]  # of the OCI image: User, Env, Entrypoint, …

    def run(self, *command: str, env: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        """Start a container; `command` follows the entrypoint."""
        words = [*self.config["Env"], *env, *self.config["Entrypoint"], *command]
        return subprocess.Popen(
            [*UNSHARE, "sh", "-c", START, "sh", str(self.root), self.config["User"], *words], text=True, **options
        )


def missing() -> str | None:
    """Why no image can be built here, or None."""
    if shutil.which("buildah") is None or shutil.which("debootstrap") is None:
        return "needs buildah and debootstrap: apt-get install buildah debootstrap"
    if os.geteuid() != 0 or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        return "needs root, and the right to make namespaces"
    return None


@contextlib.contextmanager
def build(target: str) -> Iterator[Image]:
    """`docker build --target TARGET .`, as near as can be had here; everything is removed at the end."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="embert-image-") as name:
        folder = Path(name)
        storage = [f"--root={folder}/storage", f"--runroot={folder}/run", f"--storage-driver={_driver(folder)}"]

        def buildah(*words: str | Path) -> str:
            ran = subprocess.run(["buildah", *storage, *words], capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
            return ran.stdout.strip()

        try:
            base = folder / "base"
            made = subprocess.run(
                ["debootstrap", "--variant=minbase", SUITE, base], capture_output=True, text=True, check=False
            )
            if made.returncode != 0:
                pytest.skip(f"debootstrap cannot make a base here: {made.stdout[-300:]}{made.stderr[-300:]}")
            mounts = _pip_as_here(base)
            container = buildah("from", "scratch")
            shutil.copytree(base, buildah("mount", container), symlinks=True, dirs_exist_ok=True, copy_function=_copy)
            buildah("commit", container, "localhost/base")
            volumes = [f"--volume={path}:{path}:ro" for path in mounts]
            arguments = ["--isolation=chroot", "--build-arg=BASE=localhost/base", f"--target={target}", *volumes]
            buildah("bud", *arguments, "--tag=localhost/embert", str(ROOT))
            container = buildah("from", "localhost/embert")
            config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
            yield Image(Path(buildah("mount", container)), config)
        finally:
            buildah("umount", "--all")
            buildah("rm", "--all")
            buildah("rmi", "--all", "--force")


def _driver(folder: Path) -> str:
    """How layers are stored: overlay, but not on top of another overlay."""
    asked = ["buildah", f"--root={folder}/tried", f"--runroot={folder}/tried-run", "--storage-driver=overlay", "info"]
    return "overlay" if subprocess.run(asked, capture_output=True, check=False).returncode == 0 else "vfs"


def _copy(source: str, target: str) -> None:
    if not Path(source).is_char_device():  # debootstrap's /dev; a container gets its own
        shutil.copy2(source, target)


def _pip_as_here(root: Path) -> list[str]:
    """Give `root` this machine's package indexes; returns the folders that they are in."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    options = dict(line.split("=", 1) for line in listed.splitlines())
    wanted = {}
    for name, value in options.items():
        wanted[name.rpartition(".")[2]] = value.strip("'")
    certificate = wanted.pop("cert", None)
    lines = [f"{name} = {wanted[name]}\n" for name in ("index-url", "extra-index-url", "find-links") if name in wanted]
    if certificate is not None:
        shutil.copy(certificate, root / "etc" / "pip-certificates.pem")
        lines.append("cert = /etc/pip-certificates.pem\n")
    lines.append("no-compile = no\n")  # pip's word for yes; of the packages' thousands of modules a start needs few
    (root / "etc" / "pip.conf").write_text("[global]\n" + "".join(lines))
    places = [word.removeprefix("file://") for line in lines for word in line.split()[2:]]
    local = [Path(place) for place in places if place.startswith("/") and Path(place).is_dir()]
    # The pages of a simple index point at files beside them.
    return [str(place.parent if place.name == "simple" else place) for place in local]
