# ruff: noqa: RUF001  # texts that look like others are the point
"""The default model, small random models written to disk, and HuggingFace's results to compare with."""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from embert import engine
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.cuda import encoder as cuda
from embert.engine.files.tokenizer_config import TokenizerConfig
from embert.engine.model import Model
from tests.engine.stand_in_gpu import StandInGpu
from tests.oracles.model_cases import build as build_model
from tests.oracles.model_cases import byte_level, write_modules
from tests.oracles.model_cases import small_tokenizer as small_tokenizer

# What the files next to a tokenizer.json say where it is taken as it stands.
AS_IT_STANDS = TokenizerConfig(Path("tokenizer_config.json"))

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Install = Callable[..., StandInGpu]


class BuildBert(Protocol):
    """Writes a BERT and its tokenizer. Keyword arguments are those of `build`."""

    def __call__(self, *, pooling: str | None = "mean", **config: Any) -> Path: ...


def without_own_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes this a CPU without kernels."""
    patch.setattr("embert.engine.encoders.cpu.kernels._cpu", None)


@pytest.fixture(params=[pytest.param("kernels", marks=pytest.mark.cpu("kernels")), "torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels that multiply in CPU encoders which the test loads: each kind in turn."""
    if request.param == "torch":
        without_own_kernels(monkeypatch)
    return str(request.param)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a stand-in for a model in the place of the CUDA extension, and returns it."""

    def install(model: Model, **options: Any) -> StandInGpu:
        gpu = StandInGpu(model, **options)
        monkeypatch.setattr(cuda, "_extension", lambda: gpu)
        return gpu

    return install


@pytest.fixture(scope="session")
def default_model() -> Model:
    return engine.load_model()


@pytest.fixture(scope="session")
def tokenizer(default_model: Model) -> engine.Tokenizer:
    return engine.Tokenizer(default_model)


@pytest.fixture
def read(tokenizer: engine.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the library reads, with the word cache off."""
    texts: list[str] = []
    library_ids = tokenizer._backend.library_ids

    def spy(given: Sequence[str]) -> list[bytes]:
        texts.extend(given)
        return library_ids(given)

    monkeypatch.setattr(tokenizer._backend, "_words", None)
    monkeypatch.setattr(tokenizer._backend, "library_ids", spy)
    return texts


@pytest.fixture(scope="session")
def float32_encoder(default_model: Model) -> Encoder:
    return engine.load_encoder(default_model, device="cpu", max_batch_tokens=20_000)


@pytest.fixture(scope="session")
def bfloat16_encoder(default_model: Model) -> Encoder:
    return engine.load_encoder(default_model, device="cpu", dtype="bfloat16", max_batch_tokens=20_000)


class ModelFolder(Protocol):
    """The folder of a small model, made once: a test that changes files builds its own."""

    def __call__(self, case: str) -> Path: ...


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:

    @functools.cache
    def built(case: str) -> Path:
        return build_model(tmp_path_factory.mktemp("model"), case, tokenizer=byte_level(300))

    return built


@pytest.fixture
def build_bert(tmp_path: Path) -> BuildBert:
    def build(*, pooling: str | None = "mean", **config: Any) -> Path:
        folder, tokenizer = tmp_path / "model", small_tokenizer(config.get("vocab_size", 64))
        build_model(folder, "bert", modules=False, tokenizer=tokenizer, **config)
        (folder / "tokenizer_config.json").unlink()
        if pooling is not None:
            write_modules(folder, pooling=pooling)
        return folder

    return build


class HuggingFace:
    """transformers' float32 results for sequences of one length, so without padding."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(self, ids: Ids, token_types: Ids | None = None) -> Floats:
        """int32 [L] → float32 [L, hidden], or [n, L] → [n, L, hidden]."""
        inputs = {"input_ids": torch.from_numpy(np.atleast_2d(ids).astype(np.int64))}
        if token_types is not None:
            inputs["token_type_ids"] = torch.from_numpy(np.atleast_2d(token_types).astype(np.int64))
        with torch.inference_mode():
            hidden = self._model(**inputs).last_hidden_state
        rows: Floats = hidden.reshape(*ids.shape, -1).numpy()
        return rows

    def pooled(self, ids: Ids, pooling: str) -> Floats:
        """int32 [L] → float32 [hidden], by the definition of each pooling."""
        hidden = self.hidden(ids)
        pools: dict[str, Callable[[Floats], Floats]] = {
            "cls": lambda h: h[0],
            "mean": lambda h: h.mean(0),
            "max": lambda h: h.max(0),
            "last-token": lambda h: h[-1],
        }
        return pools[pooling](hidden)


@pytest.fixture(scope="session")
def hugging_face(default_model: Model) -> HuggingFace:
    return HuggingFace(default_model.folder)


def unit(rows: Floats) -> Floats:
    """Rows divided by their length."""
    divided: Floats = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return divided


def random_sequences(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Ids]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


@pytest.fixture(scope="session")
def real_texts() -> list[str]:
    """120 texts: docstrings of the standard library, whole and cut, and texts that are not English prose."""
    odd = [
        "", " ", "\n\t  \r\n", "a", "?", "[MASK]", "[CLS] [SEP]", "ok!!! 👍🏽👨‍👩‍👧‍👦",
        "Ångström façade naïve coöperate Æsop ŒUVRE ﬁne", "Грамматика — это наука о строе языка.",
        "東京は日本の首都です。人口は約1400万人。", "한국어 문장도 있습니다.", "مرحبا بالعالم، كيف حالك؟", "שָׁלוֹם עוֹלָם",
        "हिन्दी में एक वाक्य।", "e\u0301 vs é, A\u030a vs Å", "\u200bzero\u200dwidth\ufeff", "\x00nul\x07bell\x7fdel",
        "x" * 150, "https://example.org/a/b?c=d&e=f#g-h_i%20j", "def f(x: int) -> str:\n    return f'{x!r:>10}'\n",
        "1,234.56 € + 7 % = ½ · 10⁻³", "word " * 2000, "日" * 600, "ABC" * 5000,
    ]  # fmt: skip
    folder = Path(sysconfig.get_path("stdlib"))
    docs: list[str] = []
    for path in sorted(folder.glob("*.py"))[::16]:
        tree = ast.parse(path.read_bytes())
        nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        docs += filter(None, map(ast.get_docstring, nodes))
    random = np.random.default_rng(0)
    chosen = [docs[i] for i in random.permutation(len(docs))[: 120 - len(odd)]]
    # A third are cut to a few words, like queries.
    cut = [" ".join(doc.split()[: 1 + i % 12]) if i % 3 == 0 else doc for i, doc in enumerate(chosen)]
    return odd + cut
