"""The Dockerfile: what it says, and that doing what it says makes something that serves, as a user without rights."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docker.container import build, missing
from tests.docker.dockerfile import Instruction, stages
from tests.server.live import ROOT, Live, environment, free_port, until

STAGES = stages()
SCRIPTS = ROOT / "docker" / "image"
NOBODY = 65534
IN_FULL = os.environ.get("EMBERT_TEST_IMAGE") == "1"  # CI's way: minutes more


# --- what it says ---


def test_every_run_is_one_of_our_scripts() -> None:
    runs = [run for stage in STAGES.values() for run in stage.all("RUN")]
    assert {run.words[0] for run in runs} == {f"/image/{path.name}" for path in SCRIPTS.iterdir() if path.is_file()}
    assert all("--mount=type=bind,source=docker/image,target=/image" in run.options for run in runs)
    assert all("&&" not in run.value for run in runs)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_images_are_made_from_what_has_no_compiler(name: str) -> None:
    assert list(STAGES)[-1] == "gpu", "the last stage is what `docker build` makes"
    stage = STAGES[name]
    assert stage.base == "runtime"
    assert STAGES["runtime"].base == "${BASE}"
    assert not stage.all("RUN"), "nothing is installed in an image but what its stage of installing made"
    assert {option for copy in stage.all("COPY") for option in copy.options} == {f"--from=installed-{name}"}
    for word in ("title", "description", "source", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{word}=" in stage.all("LABEL")[0].value


def test_what_runs_it() -> None:
    runtime = STAGES["runtime"]
    (user,), (entrypoint,), (stop,) = runtime.all("USER"), runtime.all("ENTRYPOINT"), runtime.all("STOPSIGNAL")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.value), "a number, which Kubernetes can tell from root's"
    assert entrypoint.words == ["embert", "serve"]
    assert stop.value == "SIGTERM"
    (folder,), (volume,) = runtime.all("WORKDIR"), runtime.all("VOLUME")
    assert folder.value == "/", "not where others write"
    assert volume.value == "/models"
    (check,) = runtime.all("HEALTHCHECK")
    assert json.loads(check.value.removeprefix("CMD ")) == ["python3", "/opt/healthcheck.py"]
    assert "ON" in STAGES["wheel-gpu"].all("RUN")[-1].words, "a missing nvcc must fail the build"


def test_the_build_context_is_what_is_copied_and_no_more() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    wanted = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    copies = [
        copy
        for stage in STAGES.values()
        for copy in stage.all("COPY")
        if not copy.options or "--from" not in copy.options[0]
    ]
    used = {source for copy in copies for source in copy.words[:-1]}
    assert all(
        any(fnmatch.fnmatch(source, each) or source.startswith(f"{each}/") for each in wanted) for source in used
    )
    assert wanted - used == {"docker/image"}
    assert patterns[0] == "*"


def test_the_driver_that_cuda_needs_is_asked_for() -> None:
    """A driver older than the base's CUDA is refused when the container starts, not when the GPU is first used."""
    (text,) = re.findall(r"^ARG CUDA_MAJOR=(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert re.search(rf"^ARG CUDA_BASE=nvidia/cuda:{text}\.", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert "NVIDIA_REQUIRE_CUDA=cuda>=${CUDA_MAJOR}.0" in STAGES["gpu"].all("ENV")[-1].value
    for name, script in (("wheel-gpu", "/image/tools"), ("installed-gpu", "/image/environment")):
        (run,) = [run for run in STAGES[name].all("RUN") if run.words[0] == script]
        assert run.words[-1] == "$CUDA_MAJOR"
        assert "CUDA_MAJOR" in {argument.value for argument in STAGES[name].all("ARG")}
    assert "CUDA_MAJOR" in {argument.value for argument in STAGES["gpu"].all("ARG")}


def test_a_base_of_another_cuda_is_refused(tmp_path: Path) -> None:
    """cuBLASLt and nvcc must be of one major version, or FP32 and older GPUs are refused when the model loads."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    (tmp_path / "apt-get").symlink_to("/bin/false")
    command = [str(SCRIPTS / "tools"), "compiler", "13"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == ("tools: CUDA_BASE has CUDA 12, and CUDA_MAJOR is 13: build with --build-arg CUDA_MAJOR=12\n")
    ran = subprocess.run([SCRIPTS / "environment", "gpu", "yes", "11"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "no list of packages for CUDA 11" in ran.stderr


PIN = re.compile(r"^([\w.-]+)==(\S+)")


@pytest.mark.parametrize("path", sorted((SCRIPTS / "requirements").iterdir()), ids=lambda path: path.name)
def test_what_an_image_installs_has_hashes(path: Path) -> None:
    pinned = {canonical(match[1]): match[2] for line in path.read_text().splitlines() if (match := PIN.match(line))}
    blocks = re.split(r"^(?=[\w.-]+==)", path.read_text(), flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pinned)
    assert all("--hash=sha256:" in block for block in blocks)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = {canonical(match[1]): match[2] for line in lines if (match := PIN.match(line))}
    both = set(pinned) & set(constraints)
    assert {name: pinned[name] for name in both} == {name: constraints[name] for name in both}, "run scripts/lock"
    if path.name == "embert.txt":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
        needed = {canonical(re.split(r"[<>=]", line)[0]) for line in wanted}
        assert needed <= set(pinned), "run scripts/lock"
        assert not {"torch", "transformers"} & set(pinned)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- doing what it says, in an empty virtual environment ---


class Installed:
    """Stages of the Dockerfile, done by hand under a folder that everybody may read."""

    def __init__(self, folder: Path, kind: str, wheels: Path | None = None) -> None:
        self.folder, self.prefix, self.wheels = folder, folder / kind, wheels or folder / "wheels"
        self.source = folder / f"source-{kind}"
        self.source.mkdir()

    def follow(self, stage: str) -> None:
        """Copy and run what the stage and the ones below it copy and run; apt's part is the machine's own here."""
        if STAGES[stage].base in STAGES:
            self.follow(STAGES[stage].base)
        for instruction in STAGES[stage].instructions:
            if instruction.name == "COPY" and not instruction.options:
                self.copy(instruction)
            elif instruction.name == "RUN" and instruction.words[0] != "/image/tools":
                self.run(instruction.words)

    def copy(self, instruction: Instruction) -> None:
        *sources, target = instruction.words
        for name in sources:
            source, place = ROOT / name, self.source / target
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(source, place)

    def run(self, words: list[str]) -> None:
        name, *arguments = words
        given = {"$MODEL": "", "$CUBLAS": "no", "$CUDA_MAJOR": "13"}
        arguments = [given.get(argument, argument) for argument in arguments]
        env = environment() | {
            "PATH": f"{Path(sys.base_prefix, 'bin')}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "EMBERT_PREFIX": str(self.prefix),
            "EMBERT_WHEELS": str(self.wheels),
            "EMBERT_MODEL_FOLDER": str(self.folder / "model"),
            "PIP_NO_COMPILE": "no",  # pip's word for yes; of the packages' thousands of modules a start needs few
        }
        command = [str(SCRIPTS / name.removeprefix("/image/")), *arguments]
        ran = subprocess.run(command, cwd=self.source, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]

    def packages(self) -> set[str]:
        (libraries,) = (self.prefix / "lib").glob("python3*")
        return {path.name for path in (libraries / "site-packages").iterdir()}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="embert-installed-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def user_without_rights(interpreter: Path) -> int | None:
    """Nobody, where we may become it and it may run this Python; else whoever we are."""
    with contextlib.suppress(PermissionError, subprocess.CalledProcessError):
        subprocess.run([interpreter, "-c", ""], user=NOBODY, check=True, capture_output=True)
        return NOBODY
    return None


@contextlib.contextmanager
def answering(process: subprocess.Popen[str], port: int, process_1: int | None = None) -> Iterator[httpx.Client]:
    """A client of what `process` serves, once it is ready; then SIGTERM ends it, within its time and with status 0.

    `process_1`: who gets the signal instead, the first process of a container.
    """
    with process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

                def ready() -> bool:
                    assert process.poll() is None, "it has ended"
                    with contextlib.suppress(httpx.TransportError):
                        return client.get("/readyz").status_code == 200
                    return False

                until(ready, 120, what="readiness")
                yield client
        finally:
            os.kill(process_1 or process.pid, signal.SIGTERM)
            process.wait(40)
        assert process.returncode == 0


def check_answers(client: httpx.Client) -> None:
    """The packaged model answers, and the page came along."""
    answer = client.post("/v1/embeddings", json={"input": "Hello, world"}).json()
    assert answer["data"][0]["embedding"][:2] == pytest.approx([-0.0561, 0.0355], abs=1e-3)
    assert client.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")
    assert client.get("/docs").status_code == 200
    assert "embert_queue_tokens" in client.get("/metrics").text


@pytest.mark.timeout(400)
@pytest.mark.skipif(not IN_FULL, reason="takes a minute: EMBERT_TEST_IMAGE=1")
@pytest.mark.skipif(IN_FULL and missing() is None, reason="the image itself is tested")
def test_the_cpu_images_install_serves_without_rights(folder: Path) -> None:
    Installed(folder, "wheel").follow("wheel-cpu")
    installed = Installed(folder, "cpu")
    installed.follow("installed-cpu")
    (engine,) = (installed.prefix / "lib").glob("python3*/site-packages/embert/engine")
    assert bool([*engine.glob("_cpu*.so")]) == (platform.machine() == "x86_64")
    assert not {"pip", "transformers"} & installed.packages()
    port = free_port()
    python = installed.prefix / "bin" / "python"
    env = {"PATH": str(python.parent), "EMBERT_PORT": str(port), "EMBERT_MODEL": "", "HF_HOME": "/nonexistent"}
    user = user_without_rights(python)
    process = subprocess.Popen([python.with_name("embert"), "serve"], cwd="/", env=env, user=user, text=True)
    with answering(process, port) as client:
        check_answers(client)
        health = [python, ROOT / "docker" / "healthcheck.py"]
        assert subprocess.run(health, env=env, check=False).returncode == 0
        env["EMBERT_PORT"] = "9"
        assert subprocess.run(health, env=env, check=False, stderr=subprocess.DEVNULL).returncode == 1


@pytest.mark.timeout(400)
@pytest.mark.skipif(not IN_FULL, reason="takes half a minute: EMBERT_TEST_IMAGE=1")
def test_the_gpu_images_install_needs_neither_torch_nor_transformers(folder: Path) -> None:
    """All but the CUDA extension, which nvcc makes: the rest is imported, serves, and says that there is no GPU."""
    source = Installed(folder, "wheel-without-cuda")
    for copy in STAGES["wheel-gpu"].all("COPY"):
        source.copy(copy)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    env = os.environ | {"EMBERT_CUDA": "OFF", "EMBERT_CPU": "OFF"}  # compiled for the image without CUDA
    subprocess.run([*wheel, folder / "wheels-gpu", "."], cwd=source.source, env=env, check=True)
    installed = Installed(folder, "gpu", folder / "wheels-gpu")
    installed.follow("installed-gpu")
    assert not {"pip", "transformers", "torch", "nvidia"} & installed.packages()
    embert = installed.prefix / "bin" / "embert"
    env = {"PATH": str(embert.parent), "EMBERT_DEVICE": "cuda", "EMBERT_PORT": "0"}
    refused = subprocess.run(
        [embert, "serve"], cwd="/", env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert refused.returncode == 1
    assert "device cuda cannot be used: built without CUDA" in refused.stderr
    port = free_port()
    shutil.copy(ROOT / "tests" / "server" / "stand_in.py", source.folder)  # ROOT has an embert of its own
    env |= {"EMBERT_PORT": str(port), "EMBERT_ENCODER": "stand_in:create", "PYTHONPATH": str(source.folder)}
    with answering(subprocess.Popen([embert, "serve"], cwd="/", env=env, text=True), port) as client:
        assert client.get("/info").json()["backend"] == "stand-in"
        assert len(client.post("/embed", json={"inputs": "a"}).json()[0]) == 384


@pytest.mark.timeout(400)
@pytest.mark.skipif(not IN_FULL, reason="takes half a minute: EMBERT_TEST_IMAGE=1")
def test_the_load_images_install_runs_the_load_tests(folder: Path, server: Live) -> None:
    installed = Installed(folder, "load")
    installed.follow("load")
    python = installed.prefix / "bin" / "python"
    options = ["queries", "--host", server.url, "--seconds", "2", "--rate", "5", "--report", str(folder / "report")]
    env = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [python, "-m", "loadtests", *options],
        cwd=installed.source,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "report" / "report.html").is_file(), ran.stdout[-3000:] + ran.stderr[-3000:]


# --- the image itself ---


@pytest.mark.timeout(900)
@pytest.mark.skipif(not IN_FULL, reason="takes minutes: EMBERT_TEST_IMAGE=1")
def test_the_image_serves_read_only_and_drains() -> None:
    with build("cpu") as image:
        assert image.config["User"] == "10001:10001"
        assert image.config["StopSignal"] == "SIGTERM"
        assert list(image.config["Volumes"]) == ["/models"]
        for tool in ("usr/bin/gcc", "usr/bin/pip3", "opt/embert/bin/pip"):
            assert not (image.root / tool).exists()
        port = free_port()
        log = image.root.parent / "log"
        with log.open("wb") as output:
            container = image.run(env=(f"EMBERT_PORT={port}",), stdout=output, stderr=output)
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
        (first,) = until(lambda: children.read_text().split(), what="process 1")
        with answering(container, port, int(first)) as client:
            check_answers(client)
        assert "draining" in log.read_text()
