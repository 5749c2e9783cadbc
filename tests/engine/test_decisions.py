"""Decisions of the engine, by models of natural language inference and by language models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import normalizers

from embert import engine
from embert.engine import Decision, Question
from embert.engine.decisions import second_texts
from embert.engine.errors import InputError, UnsupportedModel
from embert.engine.tokenization.encoded import TokenizeOptions
from tests.engine.test_decoders import VOCABULARY, gemma, llama, qwen
from tests.oracles.model_cases import build
from tests.oracles.pipelines import NLI, write

STATE = "Angela met Merkel in New York"


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    folder = write(tmp_path_factory.mktemp("nli"), "uncased", "bert", "ForSequenceClassification", NLI)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        yield loaded


def test_options_become_hypotheses(inference: engine.Engine) -> None:
    questions = [
        Question.predicate("they met"),
        Question.choice("where?", {"York": "a town", "in": ""}),
        Question.score("how far?", ["near", "far", "farther"]),
    ]
    predicate, choice, score = inference.decide(STATE, questions)
    (alone,) = inference.zero_shot([STATE], ["they met"], hypothesis_template="{}")
    assert predicate.probabilities[0] == pytest.approx(alone[0].score, abs=1e-6)
    (of_labels,) = inference.zero_shot([STATE], ["York: a town", "in"], hypothesis_template="where? {}")
    expected = {label.label: label.score for label in of_labels}
    assert choice.probabilities == pytest.approx([expected["York: a town"], expected["in"]], abs=1e-6)
    assert len(score.probabilities) == 3
    # Alone or with others, the bits are the same.
    assert [inference.decide(STATE, [question])[0] for question in questions] == [predicate, choice, score]


def test_confidence_and_score_follow_from_the_probabilities() -> None:
    decision = Decision((0.5, 0.25, 0.25))
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert decision.confidence == pytest.approx(1 - entropy / math.log(3))
    assert (decision.index, decision.score) == (0, 0.75)
    assert Decision((1.0, 0.0)).confidence == 1
    assert Decision((0.5, 0.5)).confidence == 0


@pytest.mark.parametrize(
    ("questions", "named"),
    [
        ([], "1 to 200"),
        ([Question.predicate("a")] * 201, "201"),
        ([Question.choice("a", ["b"])], "2 to 255 choices, found 1"),
        ([Question.choice("a", [*map(str, range(256))])], "found 256"),
        ([Question.score("a", [*map(str, range(11))])], "2 to 10 levels, found 11"),
    ],
)
def test_refused_questions(inference: engine.Engine, questions: list[Question], named: str) -> None:
    with pytest.raises(InputError, match=named):
        inference.decide(STATE, questions)


def test_long_state_is_cut_and_a_long_question_is_not(inference: engine.Engine) -> None:
    (cut,) = inference.decide(f"{STATE} " * 30, [Question.predicate("they met")])
    assert np.isfinite(cut.probabilities).all()
    with pytest.raises(InputError, match="questions"):
        inference.decide(STATE, [Question.predicate("they met " * 60)])


def test_model_that_does_not_decide() -> None:
    with engine.Engine.load(device="cpu") as embedder, pytest.raises(InputError, match="task decide; it has embed"):
        embedder.decide(STATE, [Question.predicate("they met")])


# --- language models ---

QWEN_TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{%- endfor %}<start_of_turn>model\n"
)
LLAMA_TEMPLATE = "{{ bos_token }}{%- for m in messages %}[INST] {{ m.content }} [/INST]{%- endfor %}"
CODES = ["AA", "AB", "BA", "ZZ"]
QUESTIONS = [
    Question.predicate("they met", no="they did not"),
    Question.choice("where?", {"York": "a town", "in": "", "déjà": "東京"}),
    Question.score("how far?", ["near", "far", "farther"]),
]


def language_model(folder: Path, case: str, tokenizer: Any, template: str) -> Path:
    build(folder, case, vocab_size=VOCABULARY, head="ForCausalLM", modules=False, max_position_embeddings=512)
    backend, fields = tokenizer()
    backend.add_tokens(CODES)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**fields, "model_max_length": 512, "chat_template": template})
    )
    return folder


@pytest.mark.parametrize(
    ("case", "tokenizer", "template"),
    [
        ("qwen3", qwen, QWEN_TEMPLATE),
        ("gemma3_text, causal", gemma, GEMMA_TEMPLATE),
        ("llama", llama, LLAMA_TEMPLATE),
        ("mistral", llama, LLAMA_TEMPLATE),
    ],
)
def test_language_models_decide_by_the_first_token_of_their_reply(
    tmp_path: Path, case: str, tokenizer: Any, template: str
) -> None:
    folder = language_model(tmp_path, case, tokenizer, template)
    reader: Any = transformers.AutoTokenizer.from_pretrained(folder)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        assert loaded.model.task_names == ["decide"]
        decided = loaded.decide(STATE, QUESTIONS, label_mass=True)
        for question, text, decision in zip(QUESTIONS, second_texts(loaded.model, QUESTIONS), decided, strict=True):
            content = f"{STATE}\n\n{text}"
            assert all(f"\n{label}. {each}\n" in content for label, each in zip("ABC", question.options, strict=False))
            chat = reader.apply_chat_template(
                [{"role": "user", "content": content}],
                tokenize=False, add_generation_prompt=True, enable_thinking=False,
            )  # fmt: skip
            before = reader(chat, add_special_tokens=False).input_ids
            labels = [reader(chat + label, add_special_tokens=False).input_ids[-1] for label in "ABC"]
            with torch.inference_mode():
                probabilities = reference(torch.tensor([before])).logits[0, -1].double().softmax(-1).numpy()
            of_options = probabilities[labels[: len(question.options)]]
            np.testing.assert_allclose(decision.probabilities, of_options / of_options.sum(), atol=1e-5)
            assert decision.label_mass == pytest.approx(of_options.sum(), abs=1e-5)
            # Alone, without the vocabulary, the bits are the same.
            assert loaded.decide(STATE, [question])[0].probabilities == decision.probabilities
        with pytest.raises(InputError, match="does not have the task embed"):
            loaded.embed([STATE])


def test_long_state_of_a_language_model_is_cut_and_the_question_stays(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        tokenizer = loaded.tokenizer
        options = TokenizeOptions(truncate=True, param="state", second_param="questions", only_first=True)
        whole, cut = (
            tokenizer.encode_pairs([STATE * count], ["the question", "another"], options) for count in (1, 300)
        )
        assert (whole.truncated, cut.truncated) == (0, 2)
        for encoded in (whole, cut):
            for number, ids in enumerate(np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])):
                (text,) = tokenizer.decode([ids.tolist()])
                assert ("the question", "another")[number] in text
        assert 500 < cut.lengths.max() <= 512
        with pytest.raises(InputError, match="the limit is 512"):
            loaded.decide(STATE, [Question.predicate("many words " * 600)])


def test_labels_are_the_codes_that_are_one_token(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        decider = loaded.model.heads.decider
        assert decider is not None
        labels = decider.classifier.labels
        assert labels[:26] == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        assert {*CODES} <= {*labels[26:]}
        many = [*map(str, range(len(labels) + 1))]
        assert len(loaded.decide(STATE, [Question.choice("a", many[:-1])])[0].probabilities) == len(labels)
        with pytest.raises(InputError, match=f"2 to {len(labels)} choices"):
            loaded.decide(STATE, [Question.choice("a", many)])


def test_letters_that_are_not_one_token_are_an_error(tmp_path: Path) -> None:
    def letterless() -> Any:
        backend, fields = qwen()
        backend.normalizer = normalizers.Replace("Q", "qq")
        return backend, fields

    folder = language_model(tmp_path, "qwen3", letterless, QWEN_TEMPLATE)
    with pytest.raises(UnsupportedModel, match="the letter Q is not one token"):
        engine.load_model(str(folder))
