"""jina's embedding models: low-rank weights that a sequence may add, on a CPU and on a stand-in for a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine import Engine, Task
from embert.engine.batch import PackedBatch
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import BrokenModel, EncoderError, InputError, ModelError, UnsupportedModel
from embert.engine.model import Model
from tests.engine.conftest import Install, random_sequences, unit
from tests.engine.stand_in_gpu import StandInEncoder, StandInGpu
from tests.oracles.exact import hidden_states
from tests.oracles.jina_v3 import TASKS, VOCABULARY, Jina, flash, peft
from tests.oracles.model_cases import build, byte_level
from tests.server.models import edit_json

LENGTHS = [1, 2, 15, 64, 3, 127, 128, 40, 40, 7, 1, 90]
ADAPTERS = np.array([0, 1, 2, 3, 4, -1, 2, 0, 4, -1, 3, 1], np.int8)
TOKENS = sum(LENGTHS)

Make = Callable[..., tuple[CudaEncoder, StandInGpu]]


def packed(lengths: list[int] = LENGTHS, adapters: Any = ADAPTERS, **more: Any) -> PackedBatch:
    sequences = random_sequences(lengths, VOCABULARY)
    return engine.pack(sequences, adapters=None if adapters is None else np.array(adapters, np.int8), **more)


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina:
    return flash(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def model(jina: Jina) -> Model:
    return engine.load_model(str(jina.folder))


@pytest.fixture
def make(install: Install) -> Make:
    """An encoder on a stand-in for the extension."""

    def made(model: Model, *, gpu: dict[str, Any] | None = None, **options: Any) -> tuple[CudaEncoder, StandInGpu]:
        stand_in = install(model, **(gpu or {}))
        encoder = CudaEncoder(model, **{"max_batch_tokens": TOKENS, **options})
        for each in stand_in.encoders:
            each.batches.clear()  # of the self test
        return encoder, stand_in

    return made


FORMS: dict[str, Callable[[Path], Jina]] = {
    "jina's": flash,
    "transformers'": peft,
    "transformers', not all modules": lambda folder: peft(folder, without=("k_proj", "fc2", "token_type_embeddings")),
}


def named(number: int) -> str | None:
    return TASKS[number] if number >= 0 else None


@pytest.mark.parametrize("form", FORMS)
def test_sequences_of_different_adapters_in_one_batch(tmp_path: Path, form: str, products: str, make: Make) -> None:
    """On the CPU; and on a stand-in for a GPU, whose batches are cut by adapter."""
    jina = FORMS[form](tmp_path)
    model = engine.load_model(str(tmp_path))
    adapters = model.config.adapters
    assert adapters is not None
    assert {*adapters.names} == {*TASKS}
    numbers = np.array([adapters.number(named(number)) for number in ADAPTERS], np.int8)
    sequences = random_sequences(LENGTHS, VOCABULARY)
    types = [ids % 2 for ids in sequences]
    batch = engine.pack(sequences, token_types=types, adapters=numbers)
    expected = [
        jina.hidden(ids, named(number), each) for ids, number, each in zip(sequences, ADAPTERS, types, strict=True)
    ]
    encoders: list[Encoder] = [engine.load_encoder(model, device="cpu", max_batch_tokens=4096)]
    if products == "torch":
        encoder, gpu = make(model)
        encoders.append(encoder)
    for each in encoders:
        hidden = each.encode(batch, Task.TOKENS)
        np.testing.assert_allclose(hidden, np.concatenate(expected), atol=2e-4)
        assert (unit(hidden) * unit(np.concatenate(expected))).sum(1).min() >= 0.999999
        vectors = unit(each.encode(batch))
        np.testing.assert_allclose(vectors, unit(np.stack([rows.mean(0) for rows in expected])), atol=1e-5)
        for index in range(len(sequences)):
            np.testing.assert_allclose(unit(each.encode(batch.take(np.array([index])))[0]), vectors[index], atol=1e-5)
    if products == "torch":
        lengths = [[np.diff(cu_seqlens).tolist() for _, cu_seqlens, *_ in each.batches[:2]] for each in gpu.encoders]
        assert lengths == [[[LENGTHS[i] for i in np.flatnonzero(numbers == adapter)]] * 2 for adapter in range(-1, 5)]


def test_engine_puts_instructions_before_texts(tmp_path: Path) -> None:
    jina, backend = flash(tmp_path), byte_level(VOCABULARY)
    texts = ["a cat", "def build(folder)"]

    def expected(prompt: str, task: str | None) -> Any:
        return unit(np.stack([jina.hidden(np.array(backend.encode(prompt + t).ids), task).mean(0) for t in texts]))

    with Engine.load(str(tmp_path), device="cpu") as loaded:
        assert loaded.model.prompts == {
            **dict.fromkeys(TASKS, ""),
            "retrieval.query": "query: ",
            "retrieval.passage": "text: ",
        }
        cases: tuple[tuple[dict[str, Any], str, str | None], ...] = (
            ({}, "", None),
            ({"task": "retrieval.query"}, "query: ", "retrieval.query"),
            ({"task": "text-matching"}, "", "text-matching"),
            ({"prompt_name": "retrieval.passage"}, "text: ", "retrieval.passage"),
            ({"task": "separation", "prompt_name": "retrieval.passage"}, "text: ", "separation"),
        )
        for how, prompt, task in cases:
            np.testing.assert_allclose(loaded.embed(texts, **how), expected(prompt, task), atol=1e-5)
        with pytest.raises(InputError) as caught:
            loaded.embed(texts, task="query")
        assert str(caught.value) == f"`task` 'query' is not known; this model's adapters: {', '.join(TASKS)}"
        with pytest.raises(EncoderError, match="adapter of sequence 1 must be -1 to 4, found 5"):
            loaded.encoder.submit(engine.pack(random_sequences([2, 2], 9), adapters=np.array([0, 5], np.int8)))


V5_TASKS = ("retrieval", "text-matching", "clustering", "classification")


@pytest.mark.parametrize("base", ["qwen3", "eurobert"])
def test_jina_embeddings_v5(tmp_path: Path, base: str) -> None:
    """Adapters of decoders in both sizes' kinds of layers, and prompts that are chosen separately."""
    folder = build(tmp_path / "v5", base, vocab_size=VOCABULARY, modules=False)
    random = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    merged = {task: dict(weights) for task in V5_TASKS}
    for task in V5_TASKS:
        adapter = folder / "adapters" / task
        adapter.mkdir(parents=True)
        fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": "gaussian"}
        (adapter / "adapter_config.json").write_text(json.dumps({**fields, "target_modules": ["q_proj", "down_proj"]}))
        tensors: dict[str, torch.Tensor] = {}
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            rows, columns = weights[name].shape
            left, right = (torch.randn(*size, generator=random) * 0.2 for size in ((rows, 4), (4, columns)))
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_B.weight": left, f"{module}.lora_A.weight": right}
            merged[task][name] = weights[name] + 2 * (left @ right)
        save_file(tensors, adapter / "adapter_model.safetensors")
    byte_level(VOCABULARY).save(str(folder / "tokenizer.json"))
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "custom_st.Transformer"}]))
    prompts = {"prompts": {"query": "Query: ", "document": "Document: "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    own = {"model_type": "jina_embeddings_v5", "task_names": V5_TASKS, "architectures": ["JinaEmbeddingsV5Model"]}
    edit_json(folder / "config.json", **own, **({} if base == "qwen3" else {"is_decoder": False}))
    backend, texts = byte_level(VOCABULARY), ["a cat", "def build(folder)"]

    def expected(prompt: str, task: str) -> Any:
        plain = build(tmp_path / task, base, vocab_size=VOCABULARY, modules=False)
        save_file(merged[task], plain / "model.safetensors")
        rows = hidden_states(plain, [np.array(backend.encode(prompt + text).ids, np.int32) for text in texts])
        return unit(np.stack([each[-1] for each in rows]))

    with Engine.load(str(folder), device="cpu") as loaded:
        assert (loaded.model.pooling, loaded.model.normalize) == ("last-token", True)
        cases: tuple[tuple[dict[str, Any], str, str], ...] = (
            ({}, "Document: ", "retrieval"),
            ({"task": "retrieval.query"}, "Query: ", "retrieval"),
            ({"task": "clustering"}, "Document: ", "clustering"),
            ({"task": "text-matching", "prompt_name": "query"}, "Query: ", "text-matching"),
        )
        for how, prompt, task in cases:
            np.testing.assert_allclose(loaded.embed(texts, **how), expected(prompt, task), atol=2e-5)
        with pytest.raises(InputError, match=r"`task` 'separation' is not known; this model's adapters: retrieval, "):
            loaded.embed(texts, task="separation")
    adapters = np.array([0, 3, -1, 1, 1], np.int8)
    sequences = random_sequences([3, 40, 7, 1, 20], VOCABULARY)
    encoder = engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    together = encoder.encode(engine.pack(sequences, adapters=adapters))
    for index, ids in enumerate(sequences):
        alone = encoder.encode(engine.pack([ids], adapters=adapters[index : index + 1]))
        np.testing.assert_array_equal(alone[0], together[index])
    for names, message in ((["../a"], "not in its folder"), ([1], "task_names must list names"), (["a", "a"], "once")):
        edit_json(folder / "config.json", task_names=names)
        with pytest.raises(BrokenModel, match=message):
            engine.load_model(str(folder))


def test_prompts_of_sentence_transformers_go_before_the_configs(tmp_path: Path) -> None:
    peft(tmp_path)
    prompts = {"retrieval_query": "find: ", "separation": "s: ", "other": "o: "}
    edit_json(tmp_path / "config_sentence_transformers.json", prompts=prompts)
    found = engine.load_model(str(tmp_path)).prompts
    assert (found["retrieval.query"], found["separation"], found["other"]) == ("find: ", "s: ", "o: ")
    assert found["text-matching"] == ""


def test_model_without_adapters_says_so() -> None:
    with Engine.load(device="cpu") as loaded, pytest.raises(InputError, match="has none") as caught:
        loaded.embed(["a"], task="retrieval.query")
    assert caught.value.param == "task"


def test_adapters_that_are_not_trained_yet(tmp_path: Path) -> None:
    flash(tmp_path, load_trained_adapters=False)
    stored = load_file(tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"has no tensor embeddings\.word_embeddings\.weight"):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    plain = {
        name.replace("parametrizations.weight.original", "weight"): x
        for name, x in stored.items()
        if "lora" not in name
    }
    save_file(plain, tmp_path / "model.safetensors")
    model = engine.load_model(str(tmp_path))
    assert model.config.adapters is None
    engine.load_encoder(model, device="cpu").close()


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        (flash, {"rotary_emb_base": -1.0}, "rotary_emb_base must be a positive float, found -1.0"),
        (flash, {"truncate_dim": 32}, "truncate_dim 32"),
        (flash, {"emb_pooler": "cls"}, "emb_pooler 'cls'"),
        (flash, {"num_attention_heads": 64}, "rotate pairs of a head's columns, found 1"),
        (flash, {"lora_adaptations": ["a", "a"]}, "lora_adaptations must list names, each once"),
        (flash, {"lora_adaptations": [str(i) for i in range(128)], "task_instructions": {}}, "at most 127"),
        (flash, {"task_instructions": {"a": "b"}}, "task_instructions has 'a'"),
        (flash, {"task_instructions": {"separation": 3}}, "task_instructions must map names to texts"),
        (flash, {"lora_rank": 0}, "lora_rank must be a positive int, found 0"),
        (flash, {"lora_rank": 8}, "lora_A has shape [5, 300, 4], config.json implies [5, 300, 8]"),
        (flash, {"lora_adaptations": ["separation"], "task_instructions": None}, "implies [1, 300, 4]"),
        (flash, {"max_position_embeddings": "128"}, "max_position_embeddings must be a positive int"),
        (peft, {"peft_type": "IA3"}, "peft_type 'IA3'"),
        (peft, {"use_dora": True}, "use_dora True"),
        (peft, {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        (peft, {"rank_pattern": {"fc1": 2}}, "rank_pattern {'fc1': 2}"),
        (peft, {"modules_to_save": ["fc1"]}, "modules_to_save"),
    ],
)
def test_fields_that_are_refused(
    tmp_path: Path, files: Callable[..., Jina], fields: dict[str, Any], message: str
) -> None:
    """Fields of jina's config.json and of adapter_config.json."""
    files(tmp_path, **fields)
    with pytest.raises(ModelError) as caught:
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    assert message in str(caught.value)


def test_adapters_files_are_checked(tmp_path: Path) -> None:
    peft(tmp_path)
    edit_json(tmp_path / "separation" / "adapter_config.json", r=2)
    with pytest.raises(UnsupportedModel, match="adapters of different r or lora_alpha are not supported; found r 4"):
        engine.load_model(str(tmp_path))
    edit_json(tmp_path / "separation" / "adapter_config.json", r=4)
    path = tmp_path / "separation" / "adapter_model.safetensors"
    stored = load_file(path)
    surplus = "base_model.model.layers.1.mlp.fc3.lora_A.weight"
    for given, message in (
        (
            {**stored, surplus: stored[surplus.replace("fc3", "fc1")].clone()},
            "fc3.lora_A.weight, which belongs to no weight",
        ),
        (
            {name: x for name, x in stored.items() if "1.mlp.fc1.lora_B" not in name},
            "fc1.lora_A.weight, which belongs to no",
        ),
        (
            {**stored, surplus.replace("fc3", "fc1"): stored[surplus.replace("fc3", "fc2")].clone()},
            r"implies \[4, 64\]",
        ),
    ):
        save_file(given, path)
        with pytest.raises(BrokenModel, match=message):
            engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    path.unlink()
    with pytest.raises(BrokenModel, match=r"separation/adapter_model\.safetensors cannot be read"):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "jina_embeddings_v3"


def lengths_run(gpu: StandInGpu) -> list[list[list[int]]]:
    """The lengths of the sequences of each batch that each encoder was given."""
    return [[np.diff(cu_seqlens).tolist() for _, cu_seqlens, *_ in each.batches] for each in gpu.encoders]


def expected(jina: Jina, batch: PackedBatch, adapters: Any = ADAPTERS) -> list[npt.NDArray[np.float64]]:
    """The oracle's hidden states of each sequence; `adapters` are numbers in its own order."""
    split = batch.cu_seqlens[1:-1]
    types = np.split(np.zeros_like(batch.ids) if batch.token_types is None else batch.token_types, split)
    texts = zip(np.split(batch.ids, split), adapters, types, strict=True)
    return [jina.hidden(ids, TASKS[number] if number >= 0 else None, kinds) for ids, number, kinds in texts]


def test_what_each_sequence_wants_stays_with_it(model: Model, make: Make, jina: Jina) -> None:
    """Tasks, dimensions and normalizing of single sequences, of which some parts have none that wants a task."""
    encoder, _ = make(model)
    tasks = [Task.EMBED if number in (0, 4) else Task.TOKENS if number == 1 else Task.EMBED | Task.TOKENS
             for number in ADAPTERS]  # fmt: skip
    dimensions, normalize = np.arange(len(LENGTHS), dtype=np.int32) * 4, np.arange(len(LENGTHS)) % 3 > 0
    batch = packed(tasks=np.array(tasks, np.uint8), dimensions=dimensions, normalize=normalize)
    outputs = encoder.wait(encoder.submit(batch))
    wanted = expected(jina, batch)
    assert [*outputs] == [Task.EMBED, Task.TOKENS]
    embedding = [i for i, task in enumerate(tasks) if Task.EMBED in task]
    np.testing.assert_allclose(
        outputs[Task.EMBED].values, np.stack([wanted[i].mean(0) for i in embedding]), atol=1e-4
    )  # the stand-in neither cuts nor normalizes
    for_tokens = [i for i, task in enumerate(tasks) if Task.TOKENS in task]
    np.testing.assert_allclose(outputs[Task.TOKENS].values, np.concatenate([wanted[i] for i in for_tokens]), atol=2e-4)
    assert outputs[Task.TOKENS].counts.tolist() == [LENGTHS[i] for i in for_tokens]


def test_two_full_batches_in_flight_and_no_third(model: Model, make: Make) -> None:
    """A third leaves nothing behind in the encoders that had room for a part of it."""
    encoder, gpu = make(model)
    first, second = packed(), packed(LENGTHS[::-1], np.roll(ADAPTERS, 5))
    assert first.tokens == second.tokens == encoder.max_batch_tokens
    alone = [encoder.encode(each) for each in (first, second)]
    tickets = [encoder.submit(each) for each in (first, second)]
    assert [len(each._outputs) for each in gpu.encoders] == [2] * 6
    for third in (packed(), packed([3], [2]), packed([3, 3], [4, -1])):
        with pytest.raises(EncoderError, match="two batches are in flight already"):
            encoder.submit(third)
    for ticket, wanted in zip(tickets, alone, strict=True):
        np.testing.assert_array_equal(encoder.wait(ticket)[Task.EMBED].values, wanted)
    with pytest.raises(EncoderError, match="not in flight"):
        encoder.wait(tickets[0])
    few = encoder.submit(packed([3, 4], [0, 1])), encoder.submit(packed([5, 6], [1, 2]))
    with pytest.raises(EncoderError, match="two batches are in flight already"):
        encoder.submit(packed([3, 4, 5], [0, 1, 2]))  # the first and the third encoder have room
    assert [len(each._outputs) for each in gpu.encoders] == [0, 1, 2, 1, 0, 0]
    for ticket in few:
        encoder.wait(ticket)
    assert encoder.encode(packed()).shape == (12, 64)


def test_adapters_that_a_model_does_not_have(model: Model, make: Make) -> None:
    encoder, gpu = make(model)
    with pytest.raises(EncoderError, match="the adapter of sequence 1 must be -1 to 4, found 5"):
        encoder.submit(packed([2, 2], [0, 5]))
    with pytest.raises(EncoderError, match="adapters must have one element a sequence, found 3"):
        encoder.submit(packed([2, 2], [0, 1, 1]))
    assert lengths_run(gpu) == [[]] * 6
    encoder.close()
    with pytest.raises(EncoderError, match="the encoder is closed"):
        encoder.submit(packed([2, 2], [0, 1]))


def test_each_adapter_has_an_encoder_with_a_self_test(model: Model, make: Make) -> None:
    """One with the weights of the adapter before it, or of none, does not start."""
    _, gpu = make(model)
    assert len(gpu.encoders) == 6
    load = StandInEncoder.load
    given: dict[tuple[int, str, int], Any] = {}
    wrong = 0

    def swapped(self: StandInEncoder, name: str, layer: int, data: Any, shape: Any, dtype: str) -> None:
        number = self.gpu.encoders.index(self)
        given[number, name, layer] = data
        if number == wrong and name in ("word", "query.weight", "inner.weight"):
            data = given[number - 1, name, layer]
        load(self, name, layer, data, shape, dtype)

    for wrong in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StandInEncoder, "load", swapped)
            with pytest.raises(UnsupportedModel, match=f"float16: with the adapter {TASKS[wrong - 1]} the self test"):
                make(model)


def change(folder: Path, number: int, factor: float) -> Model:
    """The model whose adapter of that number adds `factor` times as much to the first layer's inner weight."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"][number] *= factor
    save_file(stored, path)
    return engine.load_model(str(folder))


def test_adapter_whose_weights_float16_does_not_hold(tmp_path: Path, make: Make) -> None:
    flash(tmp_path)
    model = change(tmp_path, 3, 1e6)
    encoder, gpu = make(model)
    reason = f"inner.weight of layer 0 with the adapter {TASKS[3]} has an element of"
    assert encoder.dtype == "bfloat16"
    assert f"; bfloat16 because in float16 {reason}" in encoder.choice
    assert [each.config.dtype for each in gpu.encoders] == ["float16"] * 5 + ["bfloat16"] * 6
    assert encoder._encoders == gpu.encoders[5:]
    with pytest.raises(UnsupportedModel, match=f"in float16: {reason} .*, and float16 ends at 65504"):
        make(model, dtype="float16")
    assert make(model, dtype="float32")[0].dtype == "float32"


def test_adapter_that_is_not_finite(tmp_path: Path, make: Make) -> None:
    flash(tmp_path)
    model = change(tmp_path, 4, float("nan"))
    with pytest.raises(BrokenModel, match=f"inner.weight of layer 0 with the adapter {TASKS[4]} has elements that are"):
        make(model)
