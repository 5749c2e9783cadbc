"""Adapters: jina-embeddings-v3 in both kinds of files beside transformers' class with the adapters in its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine import Engine, Task
from embert.engine.errors import BrokenModel, EncoderError, InputError, UnsupportedModel
from tests.engine.conftest import random_sequences, unit
from tests.engine.jina import TASKS, VOCABULARY, Jina, flash, peft
from tests.engine.model_cases import byte_level
from tests.server.models import edit_json

LENGTHS = [1, 2, 15, 64, 3, 127, 128, 40, 40, 7, 1, 90]
ADAPTERS = np.array([0, 1, 2, 3, 4, -1, 2, 0, 4, -1, 3, 1], np.int8)
FORMS: dict[str, Callable[[Path], Jina]] = {
    "jina's": flash,
    "transformers'": peft,
    "transformers', not all modules": lambda folder: peft(folder, without=("k_proj", "fc2", "token_type_embeddings")),
}


def named(number: int) -> str | None:
    return TASKS[number] if number >= 0 else None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("products")
def test_sequences_of_different_adapters_in_one_batch(tmp_path: Path, form: str) -> None:
    jina = FORMS[form](tmp_path)
    model = engine.load_model(str(tmp_path))
    adapters = model.config.adapters
    assert adapters is not None
    assert {*adapters.names} == {*TASKS}
    numbers = np.array([adapters.number(named(number)) for number in ADAPTERS], np.int8)
    sequences = random_sequences(LENGTHS, VOCABULARY)
    types = [ids % 2 for ids in sequences]
    encoder = engine.load_encoder(model, device="cpu", max_batch_tokens=4096)
    hidden = encoder.encode(engine.pack(sequences, token_types=types, adapters=numbers), Task.TOKENS)
    expected = [
        jina.hidden(ids, named(number), each) for ids, number, each in zip(sequences, ADAPTERS, types, strict=True)
    ]
    np.testing.assert_allclose(hidden, np.concatenate(expected), atol=2e-4)
    assert (unit(hidden) * unit(np.concatenate(expected))).sum(1).min() >= 0.999999
    vectors = encoder.encode(engine.pack(sequences, token_types=types, adapters=numbers))
    np.testing.assert_allclose(vectors, unit(np.stack([rows.mean(0) for rows in expected])), atol=1e-5)
    for index, ids in enumerate(sequences):
        one = engine.pack([ids], token_types=types[index : index + 1], adapters=numbers[index : index + 1])
        np.testing.assert_allclose(encoder.encode(one)[0], vectors[index], atol=1e-6)
    alone = encoder.encode(engine.pack(sequences, token_types=types))[ADAPTERS < 0]
    np.testing.assert_allclose(alone, vectors[ADAPTERS < 0], atol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "last-token"])
def test_the_last_layer_on_pooled_rows_only(tmp_path: Path, pooling: str) -> None:
    jina = flash(tmp_path)
    encoder = engine.load_encoder(engine.load_model(str(tmp_path), pooling=pooling), device="cpu")
    sequences = random_sequences(LENGTHS, VOCABULARY)
    row = 0 if pooling == "cls" else -1
    expected = [jina.hidden(ids, named(number))[row] for ids, number in zip(sequences, ADAPTERS, strict=True)]
    vectors = encoder.encode(engine.pack(sequences, adapters=ADAPTERS))
    np.testing.assert_allclose(vectors, unit(np.stack(expected)), atol=1e-5)


def test_bfloat16(tmp_path: Path) -> None:
    jina = flash(tmp_path)
    encoder = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu", dtype="bfloat16")
    sequences = random_sequences(LENGTHS, VOCABULARY)
    expected = [jina.hidden(ids, named(number)).mean(0) for ids, number in zip(sequences, ADAPTERS, strict=True)]
    vectors = encoder.encode(engine.pack(sequences, adapters=ADAPTERS))
    assert (vectors * unit(np.stack(expected))).sum(1).min() >= 0.999


def test_the_engine_puts_instructions_before_texts(tmp_path: Path) -> None:
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


def test_prompts_of_sentence_transformers_go_before_the_configs(tmp_path: Path) -> None:
    peft(tmp_path)
    prompts = {"retrieval_query": "find: ", "separation": "s: ", "other": "o: "}
    edit_json(tmp_path / "config_sentence_transformers.json", prompts=prompts)
    found = engine.load_model(str(tmp_path)).prompts
    assert (found["retrieval.query"], found["separation"], found["other"]) == ("find: ", "s: ", "o: ")
    assert found["text-matching"] == ""


def test_a_model_without_adapters_says_so() -> None:
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
    ("fields", "error", "message"),
    [
        ({"rotary_emb_base": -1.0}, BrokenModel, "rotary_emb_base must be a positive float, found -1.0"),
        ({"truncate_dim": 32}, UnsupportedModel, "truncate_dim 32 is not supported; supported: None"),
        ({"emb_pooler": "cls"}, UnsupportedModel, "emb_pooler 'cls' is not supported"),
        ({"num_attention_heads": 64}, UnsupportedModel, "pairs of columns, and heads have 1"),
        ({"lora_adaptations": ["a", "a"]}, BrokenModel, "lora_adaptations must list names, each once"),
        ({"lora_adaptations": [str(i) for i in range(128)], "task_instructions": {}}, UnsupportedModel, "at most 127"),
        (
            {"task_instructions": {"a": "b"}},
            BrokenModel,
            "task_instructions has 'a', which lora_adaptations does not have",
        ),
        ({"task_instructions": {"separation": 3}}, BrokenModel, "task_instructions must map names to texts"),
        ({"lora_rank": 0}, BrokenModel, "lora_rank must be a positive int, found 0"),
        ({"lora_rank": 8}, BrokenModel, r"lora_A has shape \[5, 300, 4\], config.json implies \[5, 300, 8\]"),
        ({"lora_adaptations": ["separation"], "task_instructions": None}, BrokenModel, r"implies \[1, 300, 4\]"),
        ({"max_position_embeddings": "128"}, BrokenModel, "max_position_embeddings must be a positive int"),
    ],
)
def test_jinas_configs_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    flash(tmp_path, **fields)
    with pytest.raises(error, match=message):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModel, "rope_parameters.rope_type 'yarn' is not"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModel, "partial_rotary_factor 0.5 is not"),
        ({"rope_parameters": {"rope_theta": 0}}, BrokenModel, "rope_parameters.rope_theta must be a positive float"),
        ({"rope_parameters": 3}, BrokenModel, "rope_parameters must be an object, found int"),
        ({"head_dim": 32}, UnsupportedModel, "head_dim 32 is not supported; supported: None, 16"),
    ],
)
def test_transformers_configs_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    peft(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(error, match=message):
        engine.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; supported: 'LORA'"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"rank_pattern": {"fc1": 2}}, "rank_pattern {'fc1': 2} is not supported"),
        ({"modules_to_save": ["fc1"]}, "modules_to_save"),
    ],
)
def test_kinds_of_adapters_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    peft(tmp_path, **fields)
    with pytest.raises(UnsupportedModel, match=message):
        engine.load_model(str(tmp_path))


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
