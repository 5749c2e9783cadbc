"""The server that most tests share, and `--fast`: tests without servers, other processes and compilers."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As encoders/cpu does, and before anything imports torch, which reads it then: otherwise the threads of torch and of
# transformers spin for each other where tests share cores. 500 texts took 60 s of CPU time instead of 20.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The threads of numpy's products spin for each other, too: int8 by its definition took six times the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import httpx
import pytest
from hypothesis import settings

from tests.server.live import Live, live
from tests.server.models import build_classifier

# What is imported stays: looking at it again and again is a quarter of the time that collecting the tests takes.
gc.disable()

# A shell's background jobs ignore Ctrl-C, and so would the commands that are started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Properties are about results, not about time: a machine that stops for a moment must not fail one.
settings.register_profile("embert", deadline=None)
settings.load_profile("embert")


# What a file of tests names to start a server, another process or a compiler, or to reach a server that others started.
PROCESSES = re.compile(
    r"\b(live|Live|EMBERT|run_cli|subprocess|multiprocessing|spawn|Popen|httpx|host_program|recorded|psutil)\b"
)
# Needs neither, but seconds: thousands of texts compared with transformers, whole jobs, every schema of the API.
SLOW = re.compile(
    r"tests/engine/(quantization/test_(cpu|int8_accuracy)|test_(torch_linear|encoder|model_types|cpu_kernels))\.py"
    r"|tests/engine/heads/test_(sparse|classifier)\.py"
    r"|tests/server/(bulk|cli|engine_worker/test_scheduler_cost\.py|protocols/test_schemas\.py)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests without servers, other processes and compilers")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--fast") or not collection_path.name.startswith("test_"):
        return None
    if SLOW.search(collection_path.as_posix()):
        return True
    code = re.sub(r'#.*|"""[\s\S]*?"""', "", collection_path.read_text())
    return True if PROCESSES.search(code) else None


# Files that take longest, which go first where files are shared out: or one worker would be left with one of them.
LONGEST = (
    "test_hangs", "test_computed_forwards", "test_stopping", "test_cli", "test_scrapes", "test_monitoring",
    "test_wheels", "test_several_models", "test_devices", "test_model_types", "test_docs", "test_bounded_work",
    "test_kill", "test_embed_files", "test_start", "test_surroundings", "test_loadtests",
)  # fmt: skip


# Files whose tests run in one process: several would each start servers, a browser, or import a library for 10 s.
GROUPS = {
    "page": (re.compile(r"server/frontend/playground/"), re.compile("")),
    "heads": (
        re.compile(r"(server/frontend/|server/protocols/|test_docs)"),
        re.compile(r"\b(reranker|classifier|nli|three_heads|late_interaction|splade)\b"),
    ),
    "sentence-transformers": (
        re.compile(r"engine/"),
        re.compile(r"oracles\.sentences|engine\.checkpoints|from sentence_transformers|\(\"sentence_transformers"),
    ),
}
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first. Servers, for which tests wait, next to other work; then what keeps every core busy by itself."""
    rank = {name: place for place, name in enumerate((*GROUPS, *LONGEST))}

    def place(item: pytest.Item) -> int:
        alone = item.path.relative_to(TESTS).parts[0] in ("csrc", "engine")
        return rank.get(_group(item.path), rank.get(item.path.stem, len(rank) + alone))

    items.sort(key=place)


@functools.cache
def _group(path: Path) -> str:
    """Tests that run in one process: a file, or all files of one of GROUPS."""
    file = path.relative_to(TESTS).as_posix()
    for name, (files, content) in GROUPS.items():
        if files.match(file) and content.search(path.read_text()):
            return name
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Shares out groups. pytest-xdist's own `--dist loadgroup` finds no groups with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.partition("::")[0])

    return Groups(config, log)


@functools.cache
def missing_on_cpu(feature: str) -> str:
    """Reason why tests marked `cpu(feature)` cannot run on this machine, or an empty string."""
    from embert.engine.encoders.cpu import kernels

    if feature == "kernels":
        return "" if kernels.instruction_set() else "our own kernels were not built, or need AVX2 or NEON"
    raise pytest.UsageError(f"cpu({feature!r}): the feature is 'kernels'")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("cpu"):
        for feature in mark.args:
            if reason := missing_on_cpu(feature):
                pytest.skip(reason)


# Servers of single groups. One that waits for requests takes a hundredth of a core, and there would be dozens.
_of_a_group: list[tuple[pytest.FixtureDef[Any], Any]] = []


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    made = yield
    if fixturedef.scope == "session" and isinstance(made, Live) and fixturedef.argname != "server":
        _of_a_group.append((fixturedef, request))
    return made


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or _group(nextitem.path) != _group(item.path):
        while _of_a_group:
            fixturedef, request = _of_a_group.pop()
            fixturedef.finish(request)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    """`embert serve` with the default model, in float32 and one HTTP process on any machine, and ids on all routes."""
    with live("--device", "cpu", "--openai-accepts", "token-ids") as running:
        yield running


@pytest.fixture(scope="session")
def http(server: Live) -> Iterator[httpx.Client]:
    """A client of `server`."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`embert serve` with a small cross-encoder of random weights, named `reranker`."""
    folder = build_classifier(tmp_path_factory.mktemp("reranker"), "relevance", seed=37)
    with live(str(folder), "--device", "cpu", "--served-model-name", "reranker") as running:
        yield running


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`embert serve` with a small classifier of three labels and random weights, named `classifier`."""
    folder = build_classifier(tmp_path_factory.mktemp("classifier"), "negative", "neutral", "positive", seed=31)
    with live(str(folder), "--device", "cpu", "--served-model-name", "classifier") as running:
        yield running


@pytest.fixture(scope="session")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`embert serve` with a small classifier that has a label of entailment and random weights, named `nli`."""
    folder = build_classifier(tmp_path_factory.mktemp("nli"), "contradiction", "neutral", "entailment", seed=58)
    with live(str(folder), "--device", "cpu", "--served-model-name", "nli") as running:
        yield running


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`embert serve` with a small classifier of tokens and random weights, named `tagger`."""
    folder = build_classifier(
        tmp_path_factory.mktemp("tagger"), "O", "B-PER", "I-PER", "B-LOC", "I-LOC", seed=43, tokens=True
    )
    with live(str(folder), "--device", "cpu", "--served-model-name", "tagger") as running:
        yield running
