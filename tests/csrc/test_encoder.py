"""The CUDA encoder beside transformers in float64, and its promises: same text same bits, two in flight, no growth."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
import transformers

from embert import engine
from embert.engine.encoders.cuda import CudaEncoder
from embert.engine.errors import EncoderError, UnsupportedModel
from embert.engine.packing import PackedBatch
from embert.engine.tasks import Task
from tests.engine import families

pytestmark = pytest.mark.gpu

MAX_TOKENS = 16384
Floats = npt.NDArray[Any]


def random_bert(folder: Path, dtype: torch.dtype = torch.float32, /, **config: Any) -> Path:
    """A model with random weights. Its LayerNorms are no identities."""
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("LayerNorm.bias"):
                parameter.normal_(0.0, 0.1)
    model.to(dtype).save_pretrained(folder)  # type: ignore[operator]
    return folder


def random_mpnet(folder: Path, **config: Any) -> Path:
    """The same of MPNet, whose relative positions count as much as in a trained model."""
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    made = transformers.MPNetConfig(vocab_size=30527, max_position_embeddings=514, **config)
    model: torch.nn.Module = transformers.MPNetModel(made, add_pooling_layer=False)
    for name, parameter in model.named_parameters():
        if "relative" in name:
            parameter.data *= 100
    model.to(torch.float16).save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_bert(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def encoder(base: Path) -> Iterator[CudaEncoder]:
    made = CudaEncoder(engine.load_model(str(base)), max_batch_tokens=MAX_TOKENS)
    yield made
    made.close()


def with_cublaslt(folder: Path, pooling: str = "mean", **options: Any) -> CudaEncoder:
    """An encoder that may need cuBLASLt. Skips where this build was made without its header."""
    model = dataclasses.replace(engine.load_model(str(folder)), pooling=pooling)
    try:
        return CudaEncoder(model, max_batch_tokens=MAX_TOKENS, **options)
    except UnsupportedModel as error:
        if "this build has no cuBLASLt" not in str(error):
            raise
        pytest.skip(str(error))


def packed(random: np.random.Generator, lengths: npt.NDArray[np.int64], **more: Any) -> PackedBatch:
    ids = random.integers(1000, 30000, int(lengths.sum())).astype(np.int32)
    return PackedBatch(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), **more)


def part(batch: PackedBatch, rows: npt.NDArray[np.int64]) -> PackedBatch:
    """Some sequences of a batch, in the order given, with their raw vectors asked for."""
    pieces = [batch.ids[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] for i in rows]
    cu_seqlens = np.concatenate([[0], np.cumsum([len(p) for p in pieces])]).astype(np.int32)
    return PackedBatch(np.concatenate(pieces), cu_seqlens, normalize=np.zeros(len(pieces), np.bool_))


def agrees(encoder: CudaEncoder, got: Floats, alone: Floats) -> bool:
    """Whether texts came out as in other company: with the same bits, or up to rounding where no bits are promised."""
    return bool((got == alone).all()) if encoder.gemm == "hopper" else relative_error(got, alone) <= 2e-3


def in_parts(encoder: CudaEncoder, batch: PackedBatch) -> Floats:
    lengths = np.diff(batch.cu_seqlens)
    groups = np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(np.cumsum(lengths) // (MAX_TOKENS - 512))) + 1)
    return np.concatenate([encoder.encode(part(batch, rows)) for rows in groups])


def hugging_face(folder: Path, batch: PackedBatch, dtype: torch.dtype, pooling: str = "mean") -> Floats:
    """Pooled vectors of transformers on the GPU, sequences of like length together."""
    model: Any = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=dtype)
    model.cuda().eval()
    lengths = np.diff(batch.cu_seqlens)
    vectors = np.empty((len(lengths), model.config.hidden_size))
    order = np.argsort(lengths)
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        ids = np.zeros((len(rows), lengths[rows].max()), np.int64)
        for at, row in enumerate(rows):
            ids[at, : lengths[row]] = batch.ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        mask = torch.tensor(np.arange(ids.shape[1]) < lengths[rows][:, None], device="cuda")
        with torch.inference_mode():
            states = model(input_ids=torch.tensor(ids, device="cuda"), attention_mask=mask).last_hidden_state.double()
        if pooling == "mean":
            vector = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        elif pooling == "max":
            vector = states.masked_fill(~mask[..., None], -torch.inf).amax(1)
        else:
            vector = states[:, 0] if pooling == "cls" else states[torch.arange(len(rows)), mask.sum(1) - 1]
        vectors[rows] = vector.cpu().numpy()
    return vectors


def relative_error(got: Floats, wanted: Floats) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def cosines(a: Floats, b: Floats) -> Floats:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


# Hidden size 384 has a kernel of its own for the feed-forward layer where rows are many.
NARROW = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@pytest.mark.parametrize("config", [{}, LARGE, NARROW], ids=["base", "large", "narrow"])
def test_1000_sequences_beside_hugging_face(
    tmp_path: Path, random: np.random.Generator, config: dict[str, Any]
) -> None:
    folder = random_bert(tmp_path, **config)
    batch = packed(random, random.integers(1, 513, 1000))
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS)
    got = in_parts(ours, batch)
    ours.close()
    wanted = hugging_face(folder, batch, torch.float64)
    cosine = cosines(got, wanted)
    assert float(np.median(cosine)) >= 0.99999
    assert cosine.min() >= 0.9999
    assert relative_error(got, wanted) <= 0.8 * relative_error(hugging_face(folder, batch, torch.float16), wanted)


# A checkpoint in FP32 is rounded by transformers as a whole, here only its matrices: vectors stay as they are, of which
# gamma alone would cost more. In 16 bits nothing is rounded on either side; folded, a LayerNorm's output is not either.
# Measured, times transformers' error: 0.44 to 0.64, 0.58 to 0.80 (docs/encoder.md).
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fold", [True, False])
def test_layernorm_folded_or_separate(
    tmp_path: Path, random: np.random.Generator, stored: torch.dtype, fold: bool
) -> None:
    folder = random_bert(tmp_path, stored)
    batch = packed(random, random.integers(1, 513, 40))
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS, fold=fold)
    assert ours.layernorm == ("folded" if fold and ours.gemm == "hopper" else "separate")
    wanted = hugging_face(folder, batch, torch.float64)
    allowed = 0.8 if stored == torch.float32 else 0.9 if ours.layernorm == "folded" else 1.1
    of_torch = relative_error(hugging_face(folder, batch, torch.float16), wanted)
    assert relative_error(in_parts(ours, batch), wanted) <= allowed * of_torch
    ours.close()


@contextlib.contextmanager
def changed(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a model, to be changed in place."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    yield weights
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def started(folder: Path, layernorm: str, refusal: str) -> CudaEncoder:
    """An encoder whose LayerNorms are "folded", or "separate" because of `refusal`."""
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS)
    if ours.gemm == "hopper":
        assert ours.layernorm == layernorm
        assert (refusal in ours.fold_refusal) == (layernorm == "separate")
    return ours


def test_a_gamma_that_cannot_be_folded(tmp_path: Path, random: np.random.Generator) -> None:
    folder = random_bert(tmp_path, num_hidden_layers=2)
    with changed(folder) as weights:
        weights["encoder.layer.0.attention.output.LayerNorm.weight"][:] = 1e-6
    ours = started(folder, "separate", "gamma cannot be folded")
    batch = packed(random, np.array([5, 300]))
    # Such a LayerNorm's output is near FP16's smallest numbers, folded or not.
    assert cosines(in_parts(ours, batch), hugging_face(folder, batch, torch.float64)).min() >= 0.999
    ours.close()


@pytest.mark.parametrize(("gamma", "layernorm"), [(80.0, "folded"), (125.0, "separate")])
def test_rows_that_only_gamma_makes_too_large(
    tmp_path: Path, random: np.random.Generator, gamma: float, layernorm: str
) -> None:
    # An element of 700 times gamma is left for the product that takes the LayerNorm over, in FP16: up to 65 504.
    folder = random_bert(tmp_path, torch.float16, num_hidden_layers=2)
    layer, at = "encoder.layer.0.", 5
    with changed(folder) as weights:
        weights[layer + "attention.output.dense.bias"][at] = 700.0
        weights[layer + "attention.output.LayerNorm.weight"][at] = gamma
        weights[layer + "intermediate.dense.weight"][:, at] = 0.0
        weights[layer + "output.LayerNorm.weight"][at] = 0.01
    ours = started(folder, layernorm, "a row before it is not finite")
    batch = packed(random, np.array([5, 300]))
    wanted = hugging_face(folder, batch, torch.float64)
    of_torch = relative_error(hugging_face(folder, batch, torch.float16), wanted)
    assert relative_error(in_parts(ours, batch), wanted) <= 1.1 * of_torch
    ours.close()


@pytest.mark.parametrize(("offset", "layernorm"), [(5.0, "folded"), (200.0, "separate")])
def test_rows_that_stand_off_zero(tmp_path: Path, random: np.random.Generator, offset: float, layernorm: str) -> None:
    folder = random_bert(tmp_path, num_hidden_layers=2)
    with changed(folder) as weights:
        weights["encoder.layer.1.attention.output.dense.bias"][:] += offset
    ours = started(folder, layernorm, "deviations, at most 30")
    batch = packed(random, np.array([5, 300]))
    # FP16 holds a row at 200 in steps of 1/8, folded or not.
    limit = 3e-3 if offset < 10 else 0.1
    assert relative_error(in_parts(ours, batch), hugging_face(folder, batch, torch.float64)) <= limit
    ours.close()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_other_types(base: Path, random: np.random.Generator, dtype: str, limit: float) -> None:
    batch = packed(random, random.integers(1, 513, 40))
    ours = with_cublaslt(base, dtype=dtype)
    assert relative_error(in_parts(ours, batch), hugging_face(base, batch, torch.float64)) <= limit
    ours.close()


def test_a_text_has_the_same_bits_in_any_company(encoder: CudaEncoder, random: np.random.Generator) -> None:
    lengths = np.concatenate([[1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 200, 50)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    together = encoder.encode(part(batch, everyone))
    for _ in range(30):
        rows = random.permutation(everyone)[: int(random.integers(1, len(everyone) + 1))]
        assert (encoder.encode(part(batch, rows)) == together[rows]).all()
    for row in everyone:
        assert (encoder.encode(part(batch, everyone[row : row + 1])) == together[row]).all()


def test_a_narrow_model_has_the_same_bits_in_any_company(tmp_path: Path, random: np.random.Generator) -> None:
    ours = CudaEncoder(engine.load_model(str(random_bert(tmp_path, **NARROW))), max_batch_tokens=40_000)
    batch = packed(random, random.integers(1, 300, 230))  # some 34 000 tokens
    everyone = np.arange(230)
    together = ours.encode(part(batch, everyone))
    for count in (1, 5, 60, 90, 100, 110, 115, 120, 130, 150, 180, 200, 220):
        rows = random.permutation(everyone)[:count]
        first = ours.encode(part(batch, rows))
        assert (first == together[rows]).all(), count
        assert all((ours.encode(part(batch, rows)) == first).all() for _ in range(20))
    ours.close()


@pytest.mark.parametrize("architecture", ["xlm-roberta", "distilbert", "mpnet"])
def test_other_architectures(tmp_path: Path, random: np.random.Generator, architecture: str) -> None:
    folder = families.build(tmp_path, architecture, vocab_size=30522)
    (folder / "tokenizer.json").write_text("{}")
    model = engine.load_model(str(folder))
    ours = CudaEncoder(model, max_batch_tokens=MAX_TOKENS)
    batch = packed(random, np.array([1, 17, 64, 65, 128]))
    wanted = engine.load_encoder(model, device="cpu").encode(batch)
    assert cosines(ours.encode(batch), wanted).min() >= 0.9999
    ours.close()


@pytest.mark.parametrize("architecture", ["roberta, padded with 5", "xlm-roberta", "mpnet"])
@pytest.mark.parametrize("graphs", [True, False])
def test_padding_tokens_inside_texts(tmp_path: Path, architecture: str, graphs: bool) -> None:
    folder = families.build(tmp_path, architecture, vocab_size=30522)
    (folder / "tokenizer.json").write_text("{}")
    model = engine.load_model(str(folder))
    ours = CudaEncoder(model, max_batch_tokens=MAX_TOKENS, graphs=graphs)
    padding = model.architecture.padding_id
    assert padding is not None
    random = np.random.default_rng(0)
    patterns = ["p", "pt", "tp", "tptt", "ttpp", "pptt", "ptptp", "tttp" * 30, "p" * 128, "ttttt", "t" * 128]
    texts = [np.where([c == "p" for c in each], padding, random.integers(10, 30000, len(each))) for each in patterns]
    lengths = np.array([len(text) for text in texts])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = PackedBatch(np.concatenate(texts).astype(np.int32), cu_seqlens)
    everyone = np.arange(len(texts))
    together = ours.encode(part(batch, everyone))
    wanted = engine.load_encoder(model, device="cpu").encode(part(batch, everyone))
    assert cosines(together, wanted).min() >= 0.9999
    for row in everyone:  # alone, those without padding are a graph
        assert agrees(ours, ours.encode(part(batch, everyone[row : row + 1])), together[row : row + 1])
    ours.close()


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_mpnet(tmp_path_factory.mktemp("mpnet"), num_hidden_layers=4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last-token"])
@pytest.mark.parametrize("gemm", ["auto", "cublaslt"])
def test_relative_positions(mpnet: Path, random: np.random.Generator, pooling: str, gemm: str) -> None:
    ours = with_cublaslt(mpnet, pooling, gemm=gemm)
    lengths = np.concatenate([[1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 300, 40)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    together = ours.encode(part(batch, everyone))
    wanted = hugging_face(mpnet, batch, torch.float64, pooling)
    of_torch = relative_error(hugging_face(mpnet, batch, torch.float16, pooling), wanted)
    assert relative_error(together, wanted) <= 1.1 * of_torch
    for rows in (*(everyone[i : i + 1] for i in everyone), random.permutation(everyone)[:7], everyone[::-1]):
        assert agrees(ours, ours.encode(part(batch, rows)), together[rows])
    ours.close()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_relative_positions_in_other_types(mpnet: Path, random: np.random.Generator, dtype: str, limit: float) -> None:
    batch = packed(random, random.integers(1, 513, 40))
    ours = with_cublaslt(mpnet, dtype=dtype)
    assert relative_error(in_parts(ours, batch), hugging_face(mpnet, batch, torch.float64)) <= limit
    ours.close()


def test_relative_positions_of_narrow_heads(tmp_path: Path, random: np.random.Generator) -> None:
    folder = random_mpnet(tmp_path, **NARROW)
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS)
    batch = packed(random, random.integers(1, 513, 100))
    wanted = hugging_face(folder, batch, torch.float64)
    assert relative_error(in_parts(ours, batch), wanted) <= 1.1 * relative_error(
        hugging_face(folder, batch, torch.float16), wanted
    )
    ours.close()


@pytest.mark.parametrize("pooling", ["cls", "last-token", "max"])
@pytest.mark.parametrize("gemm", ["auto", "cublaslt"])
def test_other_poolings(base: Path, random: np.random.Generator, pooling: str, gemm: str) -> None:
    ours = with_cublaslt(base, pooling, gemm=gemm)
    lengths = np.concatenate([[1, 2, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 200, 40)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    # Many rows of which few are pooled, and few rows: the last layer runs on the pooled ones, or on all.
    together = ours.encode(part(batch, everyone))
    wanted = hugging_face(base, batch, torch.float64, pooling)
    of_torch = relative_error(hugging_face(base, batch, torch.float16, pooling), wanted)
    assert relative_error(together, wanted) <= 1.1 * of_torch
    for rows in (
        *(everyone[i : i + 1] for i in everyone),
        random.permutation(everyone)[:7],
        everyone[:2],
        everyone[::-1],
    ):
        assert agrees(ours, ours.encode(part(batch, rows)), together[rows])
    ours.close()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_kernel_of_a_small_model(tmp_path: Path, random: np.random.Generator, pooling: str) -> None:
    """Few rows and many, graphs and none: small enough for scripts/sanitize, beside transformers on the CPU."""
    folder = random_bert(
        tmp_path, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024, vocab_size=30522
    )
    ours = CudaEncoder(dataclasses.replace(engine.load_model(str(folder)), pooling=pooling), max_batch_tokens=4096)
    batch = packed(random, np.array([20, 100, 512, *[150] * 20]))
    together = ours.encode(batch)
    for rows in (np.array([0]), np.array([1]), np.array([2]), np.array([0, 1, 2])):
        few = PackedBatch(part(batch, rows).ids, part(batch, rows).cu_seqlens)
        assert agrees(ours, ours.encode(few), together[rows])
    model: Any = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    ids = torch.tensor(batch.ids[batch.cu_seqlens[1] : batch.cu_seqlens[2]].astype(np.int64))
    with torch.inference_mode():
        states = model.eval()(input_ids=ids[None]).last_hidden_state[0]
    wanted = (states[0] if pooling == "cls" else states.mean(0)).numpy()
    assert together[1] @ wanted / np.linalg.norm(wanted) >= 0.99999
    ours.close()


def test_1000_repeats_are_equal(encoder: CudaEncoder, random: np.random.Generator) -> None:
    for lengths in (random.integers(1, 60, 12), random.integers(1, 300, 40)):
        batch = packed(random, lengths)
        first = encoder.encode(batch)
        assert all((encoder.encode(batch) == first).all() for _ in range(500))


def test_two_batches_in_flight(encoder: CudaEncoder, random: np.random.Generator) -> None:
    batches = [packed(random, random.integers(1, 200, int(n))) for n in random.integers(1, 90, 20)]
    alone = [encoder.encode(batch) for batch in batches]
    tickets = [encoder.submit(batches[0])]
    for i, batch in enumerate(batches[1:]):
        tickets.append(encoder.submit(batch))
        assert (encoder.wait(tickets[i])[Task.EMBED].values == alone[i]).all()
    assert (encoder.wait(tickets[-1])[Task.EMBED].values == alone[-1]).all()


def test_a_third_batch_in_flight_is_refused(encoder: CudaEncoder, random: np.random.Generator) -> None:
    batch = packed(random, np.array([5]))
    tickets = [encoder.submit(batch), encoder.submit(batch)]
    with pytest.raises(EncoderError, match="two batches are in flight already"):
        encoder.submit(batch)
    for ticket in tickets:
        encoder.wait(ticket)


def test_a_ticket_is_redeemed_once(encoder: CudaEncoder, random: np.random.Generator) -> None:
    batches = [packed(random, np.array([length])) for length in (5, 50)]
    first = encoder.submit(batches[0])
    encoder.wait(first)
    second = encoder.submit(batches[1])
    with pytest.raises(EncoderError, match="this ticket is not in flight"):
        encoder.wait(first)
    assert encoder.wait(second)[Task.EMBED].values.shape == (1, 768)


def test_a_batch_that_is_refused_harms_none_in_flight(encoder: CudaEncoder, random: np.random.Generator) -> None:
    batch = packed(random, np.array([40, 300]))
    wanted = encoder.encode(batch)
    ticket = encoder.submit(batch)
    for wrong in (-1, 769):
        with pytest.raises(EncoderError, match=f"dimensions of sequence 0 must be 0 to 768, found {wrong}"):
            encoder.submit(PackedBatch(batch.ids, batch.cu_seqlens, dimensions=np.array([wrong, 0], np.int32)))
    assert (encoder.wait(ticket)[Task.EMBED].values == wanted).all()


@pytest.mark.parametrize("count", [3, 100])
def test_dimensions_and_normalize(encoder: CudaEncoder, random: np.random.Generator, count: int) -> None:
    lengths = random.integers(1, 100, count)
    batch = packed(random, lengths)
    raw = encoder.encode(part(batch, np.arange(count)))
    dimensions = random.choice([0, 1, 64, 768], count).astype(np.int32)
    normalize = random.random(count) < 0.5
    wanted = raw.copy()
    for row, kept in zip(wanted, dimensions, strict=True):
        row[kept or 768 :] = 0
    wanted[normalize] /= np.linalg.norm(wanted[normalize], axis=1, keepdims=True)
    got = encoder.encode(PackedBatch(batch.ids, batch.cu_seqlens, dimensions=dimensions, normalize=normalize))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_token_vectors_and_their_mean(encoder: CudaEncoder, random: np.random.Generator) -> None:
    lengths = np.array([3, 40, 1, 300])
    batch = packed(random, lengths)
    states = encoder.encode(batch, Task.TOKENS)
    assert states.shape == (lengths.sum(), 768)
    means = np.stack([rows.mean(axis=0) for rows in np.split(states, np.cumsum(lengths)[:-1])])
    # Token vectors are rounded to FP16 on the way, pooled ones are not.
    np.testing.assert_allclose(means, encoder.encode(part(batch, np.arange(4))), rtol=2e-3, atol=5e-4)


def test_an_empty_batch(encoder: CudaEncoder) -> None:
    empty = PackedBatch(np.empty(0, np.int32), np.zeros(1, np.int32))
    assert encoder.encode(empty).shape == (0, 768)
    assert encoder.wait(encoder.submit(empty.wanting(Task.TOKENS))) == {}


@pytest.mark.parametrize(
    ("ids", "cu_seqlens", "message"),
    [
        ([30522], [0, 1], "outside the vocabulary"),
        ([-1], [0, 1], "outside the vocabulary"),
        ([5] * 513, [0, 513], "513 tokens"),
        ([5, 5], [0, 0, 2], "sequence 0 has 0 tokens"),
        ([5, 5], [0, 1], "cu_seqlens"),
        ([5] * (MAX_TOKENS + 1), [0, MAX_TOKENS + 1], "at most 16384 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused_and_harms_nothing(
    encoder: CudaEncoder, ids: list[int], cu_seqlens: list[int], message: str
) -> None:
    with pytest.raises(EncoderError, match=message):
        encoder.encode(PackedBatch(np.array(ids, np.int32), np.array(cu_seqlens, np.int32)))
    assert encoder.encode(PackedBatch(np.array([5], np.int32), np.array([0, 1], np.int32))).shape == (1, 768)


@pytest.mark.alone
def test_memory_is_bounded_and_does_not_grow(encoder: CudaEncoder, random: np.random.Generator) -> None:
    def forwards(count: int) -> None:
        for _ in range(count):
            encoder.encode(packed(random, random.integers(1, 513, int(random.integers(1, 40)))))

    forwards(50)
    weights, _, before = encoder.memory
    assert before - weights <= 600e6
    forwards(1000)
    assert encoder.memory[2] <= before
