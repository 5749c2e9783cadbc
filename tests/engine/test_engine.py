"""Engine, packing, heads, and the choice of an encoder."""

from __future__ import annotations

import dataclasses
import platform
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embert import engine
from embert.engine import encoders
from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.cpu import kernels
from embert.engine.errors import EncoderError, InputError, UnsupportedModel
from embert.engine.heads.embedding import EmbeddingHead
from embert.engine.model import Model
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import TokenizeOptions
from tests.engine.conftest import without_own_kernels
from tests.server.models import three_heads


class Lengths(Encoder):
    """An encoder that returns each sequence's length and first id, and records its batches."""

    name, device, device_name, dtype, choice = "lengths", "nowhere", "nothing", "float32", ""

    def __init__(self, model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> None:
        self.asked = (device, dtype)
        self.width, self.hidden_size = model.width, model.config.hidden_size
        self.max_batch_tokens = max_batch_tokens or 64
        self.batches: list[PackedBatch] = []
        self.in_flight = 0

    def submit(self, batch: PackedBatch) -> PackedBatch:
        assert batch.tokens <= self.max_batch_tokens
        self.in_flight += 1
        assert self.in_flight <= 2
        self.batches.append(batch)
        return batch

    def wait(self, ticket: PackedBatch) -> dict[Task, TaskOutput]:
        self.in_flight -= 1
        output = np.zeros((ticket.sequences, self.width), np.float32)
        output[:, 0] = np.diff(ticket.cu_seqlens)
        output[:, 1] = ticket.ids[ticket.cu_seqlens[:-1] + 1]
        return {Task.EMBED: TaskOutput.one_each(output)}

    def close(self) -> None:
        self.batches.clear()


STAND_IN = f"{__name__}:Lengths"


@pytest.fixture
def stand_in(default_model: Model) -> Iterator[engine.Engine]:
    model = dataclasses.replace(
        default_model, max_input_length=32, prompts={"q": "find : ", "d": ""}, default_prompt_name="d"
    )
    with engine.Engine.load(model, encoder=STAND_IN, device="cpu") as loaded:
        yield loaded


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.integers(0, 40), max_size=60), budget=st.integers(32, 64))
def test_embed_keeps_order_and_budget(stand_in: engine.Engine, words: list[int], budget: int) -> None:
    encoder: Any = stand_in.encoder
    encoder.batches.clear()
    done: list[int] = []
    vectors = stand_in.embed(["cat " * n for n in words], batch_tokens=budget, progress=done.append)
    assert vectors[:, 0].tolist() == [min(n + 2, 32) for n in words]
    assert sum(done) == len(words)
    assert len(done) == len(encoder.batches)
    assert all(batch.tokens <= budget for batch in encoder.batches)
    # Each batch is full: the first text of the next batch does not fit.
    for batch, following in zip(encoder.batches, encoder.batches[1:], strict=False):
        assert batch.tokens + following.cu_seqlens[1] > budget


def test_embed_iter(stand_in: engine.Engine) -> None:
    texts = ["cat " * (i % 9) for i in range(25)]
    blocks = list(stand_in.embed_iter(iter(texts), window=10))
    assert [len(block) for block in blocks] == [10, 10, 5]
    np.testing.assert_array_equal(np.concatenate(blocks), stand_in.embed(texts))


def test_prompts(stand_in: engine.Engine) -> None:
    assert stand_in.embed(["cat"])[0, 0] == 3
    assert stand_in.embed(["cat"], prompt_name="q")[0, 0] == 5
    with pytest.raises(InputError) as caught:
        stand_in.embed(["cat"], prompt_name="x")
    assert str(caught.value) == "`prompt_name` 'x' is not known; this model's prompts: q, d"
    assert caught.value.param == "prompt_name"


def test_dimensions_and_normalize(stand_in: engine.Engine) -> None:
    encoder: Any = stand_in.encoder
    assert stand_in.embed(["cat"], dimensions=7, normalize=False).shape == (1, 7)
    assert encoder.batches[-1].dimensions.tolist() == [7]
    assert encoder.batches[-1].normalize.tolist() == [False]
    assert stand_in.embed(["cat"]).shape == (1, 384)
    assert encoder.batches[-1].dimensions is None
    for bad in (0, -1, 385):
        with pytest.raises(InputError, match=f"`dimensions` must be from 1 to 384, found {bad}") as caught:
            stand_in.embed(["cat"], dimensions=bad)
        assert caught.value.param == "dimensions"


def test_truncate_false(stand_in: engine.Engine) -> None:
    with pytest.raises(InputError, match="`texts`: text 1 has 42 tokens, the limit is 32"):
        stand_in.embed(["cat", "cat " * 40], truncate=False)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("a cat", "`texts` must be a list, found one str"),
        (b"a cat", "`texts` must be a list, found one bytes"),
        (None, "`texts` must be a list, found NoneType"),
        ({"a": "cat"}, "`texts` must be a list, found dict"),
        (["a", None], "`texts`: text 1 must be a string, found NoneType"),
        (["a", ["b", "c"]], "`texts`: text 1 must be a string, found list"),
        ([("a", "b")], "`texts`: text 0 must be a string, found tuple"),
        (("a", 3), "`texts`: text 1 must be a string, found int"),
    ],
)
def test_texts_of_a_wrong_type(stand_in: engine.Engine, texts: Any, said: str) -> None:
    tokenizer = stand_in.tokenizer
    for ask in (
        lambda: stand_in.embed(texts),
        lambda: tokenizer.encode(texts, TokenizeOptions(param="texts")),
        lambda: tokenizer.encode_pairs(["a"], texts),
        lambda: tokenizer.tokenize(texts, param="texts"),
    ):
        with pytest.raises(InputError) as caught:
            ask()
        assert str(caught.value).startswith(said)
        assert caught.value.param == "texts"


def test_iterables_of_a_wrong_type(stand_in: engine.Engine) -> None:
    for texts in ("a cat", iter(["a", None])):
        with pytest.raises(InputError):
            next(stand_in.embed_iter(texts))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`window`"):
        next(stand_in.embed_iter(["a cat"], window=0))


@pytest.mark.parametrize("ids", ["12", [1, 2], [[1], "2"], [["1"]], [[1], None], None])
def test_ids_of_a_wrong_type(stand_in: engine.Engine, ids: Any) -> None:
    for ask in (lambda: stand_in.tokenizer.from_ids(ids), lambda: stand_in.tokenizer.decode(ids)):
        with pytest.raises(InputError):
            ask()


@pytest.mark.parametrize(
    "options",
    [
        *({"dimensions": "3"}, {"dimensions": True}, {"prompt_name": ["q"]}, {"task": 1}),
        *({"normalize": "false"}, {"truncate": "false"}, {"truncate": 0}, {"batch_tokens": 0}, {"batch_tokens": 1.5}),
    ],
)
def test_options_of_another_type(stand_in: engine.Engine, options: Any) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(options))}`"):
        stand_in.embed(["cat"], **options)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    """A model with vectors of three kinds."""
    with engine.Engine.load(str(three_heads(tmp_path_factory.mktemp("three"))), device="cpu") as loaded:
        yield loaded


BAD = "doctor medicine"  # which has weights of tokens


@pytest.mark.parametrize(("method", "wrong"), [("embed", np.nan), ("embed_sparse", np.inf), ("embed_multi", -np.inf)])
def test_vectors_that_are_not_finite(
    three: engine.Engine, monkeypatch: pytest.MonkeyPatch, method: str, wrong: float
) -> None:
    """The error names the text, in whatever order texts are batched."""
    ids = three.tokenizer.encode([BAD]).ids
    wait = three.encoder.wait

    def poisoned(ticket: Any) -> dict[Task, TaskOutput]:
        output = wait(ticket)
        for rows in output.values():
            for sequence, ids_of in enumerate(batches.pop(id(ticket))):
                if np.array_equal(ids_of, ids):
                    assert rows.counts[sequence]
                    rows.values[rows.offsets[sequence + 1] - 1, -1] = wrong
        return output

    batches: dict[int, list[Any]] = {}
    submit = three.encoder.submit

    def recorded(batch: PackedBatch) -> Any:
        ticket = submit(batch)
        batches[id(ticket)] = np.split(batch.ids, batch.cu_seqlens[1:-1])
        return ticket

    monkeypatch.setattr(three.encoder, "submit", recorded)
    monkeypatch.setattr(three.encoder, "wait", poisoned)
    texts = ["a", "an apple tree", BAD, "two words"]
    with pytest.raises(EncoderError, match="not finite, for text 2"):
        getattr(three, method)(texts, batch_tokens=1)
    assert len(getattr(three, method)(["a", "an apple tree"])) == 2
    task = {"embed": Task.EMBED, "embed_sparse": Task.SPARSE, "embed_multi": Task.MULTI}[method]
    with pytest.raises(EncoderError, match="not finite, for text 1"):
        three.encoder.encode(engine.pack([ids[:2], ids]), task)


def test_no_texts(default_model: Model, tokenizer: engine.Tokenizer, float32_encoder: Encoder) -> None:
    loaded = engine.Engine(default_model, tokenizer, float32_encoder)
    assert loaded.embed([]).shape == (0, 384)
    assert loaded.embed([], dimensions=5).shape == (0, 5)
    assert list(loaded.embed_iter([])) == []


def test_a_row_of_zeros_stays_zeros(default_model: Model) -> None:
    head = EmbeddingHead(default_model.folder, default_model.after_pooling)
    assert not head(np.zeros((2, 384), np.float32)).any()


@pytest.mark.cpu("kernels")
def test_kernels_are_limited_to_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    best, width = kernels.instruction_set(), kernels.lanes()
    least = "NEON" if platform.machine() == "aarch64" else "AVX2"
    monkeypatch.setenv("EMBERT_CPU_ISA", least)
    assert kernels.instruction_set() == least
    monkeypatch.undo()
    assert (kernels.instruction_set(), kernels.lanes()) == (best, width)


def test_unknown_instruction_set_is_refused(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERT_CPU_ISA", "AVX3")
    with pytest.raises(UnsupportedModel, match=r"EMBERT_CPU_ISA is 'AVX3'; supported: (AVX2|NEON)"):
        engine.load_encoder(default_model, device="cpu")


def test_choosing_an_encoder(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.engine.encoders.loader._cuda_unavailable", lambda: "built without CUDA")
    chosen = engine.load_encoder(default_model)
    assert chosen.name == ("torch" if kernels.instruction_set() is None else "cpu")
    assert chosen.choice.startswith("no CUDA device: built without CUDA; ")
    assert chosen.max_batch_tokens == 2048
    reference = engine.load_encoder(default_model, encoder="torch")
    assert (reference.name, reference.choice) == ("torch", "the torch encoder was asked for; torch's operators")
    unsupported = engine.load_encoder(default_model, dtype="bfloat16")
    assert unsupported.name == "torch"
    assert "bfloat16 has no kernels" in unsupported.choice
    with monkeypatch.context() as patch:
        without_own_kernels(patch)
        assert engine.load_encoder(default_model).name == "torch"
        with pytest.raises(UnsupportedModel, match="the cpu encoder needs embert's kernels"):
            engine.load_encoder(default_model, encoder="cpu")
    own: Any = engine.load_encoder(default_model, encoder=STAND_IN, device="tpu", dtype="bfloat16")
    assert own.asked == ("tpu", "bfloat16")
    assert own.choice == f"the encoder {STAND_IN} was asked for"


class Cuda(Lengths):
    def __init__(self, model: Model, *, gemm: str = "auto", **options: Any) -> None:
        super().__init__(model, **options)
        self.gemm = gemm


@pytest.fixture
def cuda_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the CUDA encoder's module makes this a machine with a GPU."""
    module: Any = types.ModuleType("embert.engine.encoders.cuda.encoder")
    module.unavailable_reason, module.CudaEncoder = lambda: None, Cuda
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_cuda_device_is_preferred(default_model: Model, cuda_module: Any) -> None:
    for options, device in (({}, "cuda:0"), ({"device": "cuda:1"}, "cuda:1")):
        chosen: Any = engine.load_encoder(default_model, **options)  # type: ignore[arg-type]
        assert (chosen.asked, chosen.gemm) == ((device, "auto"), "auto")
    chosen = engine.load_encoder(default_model, encoder="cuda-portable", device="cuda:1", dtype="bfloat16")
    assert (chosen.asked, chosen.gemm) == (("cuda:1", "bfloat16"), "cublaslt")
    assert engine.load_encoder(default_model, device="cpu").device == "cpu"
    cuda_module.unavailable_reason = lambda: "no driver"
    assert engine.load_encoder(default_model).choice.startswith("no CUDA device: no driver; ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "device cuda cannot be used: built without CUDA"),
        ({"device": "cuda:3"}, "device cuda:3 cannot be used: built without CUDA"),
        ({"encoder": "cuda"}, "device cuda cannot be used: built without CUDA"),
        ({"encoder": "cuda", "device": "cpu"}, "the cuda encoder does not run on device cpu"),
        ({"encoder": "cuda-portable"}, "device cuda cannot be used: built without CUDA"),
        ({"encoder": "cuda-portable", "device": "cpu"}, "the cuda-portable encoder does not run on device cpu"),
        ({"encoder": "torch", "device": "cuda"}, "the torch encoder does not run on device cuda"),
        ({"encoder": "cpu", "device": "cuda"}, "the cpu encoder does not run on device cuda"),
        ({"encoder": "cpu", "dtype": "bfloat16"}, "dtype bfloat16 is not supported on a CPU by the cpu encoder"),
        ({"device": "tpu"}, "device 'tpu' is not supported; supported: auto, cpu, cuda, cuda:N"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported; supported: auto, float32, float16, bfloat16, int8"),
        ({"dtype": "float16"}, "dtype float16 is not supported on a CPU"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be at least 1, found 0"),
        ({"encoder": "onnx"}, "encoder 'onnx' is not supported"),
        ({"encoder": "no.such:thing"}, "the encoder no.such:thing cannot be imported: No module named 'no'"),
    ],
)
def test_encoders_that_are_refused(
    default_model: Model, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embert.engine.encoders.loader._cuda_unavailable", lambda: "built without CUDA")
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(message)}"):
        engine.load_encoder(default_model, **options)


def test_without_torch(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is an extra: the error says what needs it and what to install."""
    for module in [name for name in sys.modules if name.startswith("embert.engine.encoders.torch")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(encoders, "torch", raising=False)  # the submodule, once imported, is the package's attribute
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedModel, match=r"torch .*bfloat16 has no kernels.*pip install 'embert\[torch\]'"):
        engine.load_encoder(default_model, device="cpu", dtype="bfloat16")


@pytest.mark.cpu("kernels")
def test_engine_on_a_cpu_does_not_import_torch() -> None:
    program = (
        "import sys; from embert.engine import Engine; "
        "assert Engine.load(device='cpu').embed(['a text']).shape == (1, 384); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
