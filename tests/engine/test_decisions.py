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
from safetensors.torch import save_file
from tokenizers import normalizers

from embert import engine
from embert.engine import Decision, Question
from embert.engine.decisions import second_texts
from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.errors import InputError, UnsupportedModel
from embert.engine.heads.description import LabelDecider
from embert.engine.tokenization.encoded import TokenizeOptions
from tests.engine.test_decoders import VOCABULARY, gemma, llama, qwen, write_tokenizer
from tests.oracles.model_cases import build
from tests.oracles.pipelines import NLI, cased, write

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


def test_long_state_is_cut_and_a_long_question_is_not(inference: engine.Engine) -> None:
    (cut,) = inference.decide(f"{STATE} " * 30, [Question.predicate("they met")])
    assert np.isfinite(cut.probabilities).all()
    with pytest.raises(InputError, match="questions"):
        inference.decide(STATE, [Question.predicate("they met " * 60)])


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


def language_model(folder: Path, case: str, tokenizer: Any, template: str, **more: Any) -> Path:
    build(folder, case, vocab_size=VOCABULARY, head="ForCausalLM", modules=False, max_position_embeddings=512, **more)
    write_tokenizer(folder, tokenizer, *CODES, model_max_length=512, chat_template=template)
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


def test_int8_is_measured_on_statements(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE, head_dim=64, **shape)
    with engine.Engine.load(str(folder), device="cpu", dtype="int8", min_agreement=0.9) as loaded:
        accuracy = loaded.encoder.int8_accuracy
        assert accuracy is not None
        assert (accuracy.measure, accuracy.neighbors) == ("correlation", None)


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
        bounded = engine.Tokenizer(loaded.model, most_unbroken=40_000)
        assert bounded.encode_pairs(["a" * 100_000], ["the question"], options).truncated == 1
        with pytest.raises(InputError, match="the limit is 512"):
            loaded.decide(STATE, [Question.predicate("many words " * 600)])


def test_labels_are_the_codes_that_are_one_token(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        decider = loaded.model.heads.decider
        assert isinstance(decider, LabelDecider)
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


# --- Laya ---

HIDDEN, MARK = 128, "[MASK]"
SETTINGS = {
    "encoder": "modernbert", "head_layers": 2, "max_len": 60, "head_max_len": 40,
    "temperature": [1.5, 0.1, 2.0], "temperature_by_options": {"choice:3-5": 0.8, "score:2": 9.0},
}  # fmt: skip


class Scorer(torch.nn.Module):
    """Laya's head, of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(HIDDEN, 2, 4 * HIDDEN, batch_first=True, norm_first=True)
        self.head = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.type_emb = torch.nn.Embedding(3, HIDDEN)
        self.scorer = torch.nn.Sequential(
            torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, 1)
        )
        for parameter in self.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1


def laya(folder: Path) -> tuple[Any, Scorer]:
    """Writes a model in Laya's layout. Returns its encoder and its head."""
    build(
        folder / "encoder", "modernbert", vocab_size=400, modules=False,
        hidden_size=HIDDEN, num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    encoder: Any = transformers.AutoModel.from_pretrained(folder / "encoder")
    scorer = Scorer()
    scorer.eval()
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()} | scorer.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "encoder" / "model.safetensors").unlink()
    (folder / "rl_agent_config.json").write_text(json.dumps(SETTINGS))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": MARK, "pad_token": "[PAD]"}
    (folder / "tokenizer").mkdir()
    tokenizer = cased()
    tokenizer.add_special_tokens([*special.values()])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", **special}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(fields))
    return encoder, scorer


def laya_logits(folder: Path, models: tuple[Any, Scorer], question: str, options: list[str], kind: int) -> list[float]:
    encoder, scorer = models
    reader: Any = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")

    def tokens(text: str) -> list[int]:
        return list(reader(text, add_special_tokens=False).input_ids)

    marked = [[reader.mask_token_id, *tokens(f" {option}")[:48]] for option in options]
    left = 40 - sum(map(len, marked))
    if left < 16:
        marked = [option[: max(4, 24 // len(marked))] for option in marked]
        left = 40 - sum(map(len, marked))
    row = [reader.cls_token_id, *tokens(question)[: max(8, left)], reader.sep_token_id]
    places = []
    for option in marked:
        places.append(len(row))
        row += option
    row.append(reader.sep_token_id)
    row += [*tokens(STATE * 4)[: 60 - len(row) - 1], reader.sep_token_id]
    with torch.inference_mode():
        hidden = encoder(torch.tensor([row])).last_hidden_state + scorer.type_emb.weight[kind]
        found: list[float] = scorer.scorer(scorer.head(hidden))[0, places, 0].tolist()
    return found


def test_layas_rows_and_head(tmp_path: Path) -> None:
    models = laya(tmp_path)
    wanted = [
        ("noul question: they met", ["false: they did not", "true: yes, the statement holds"], 2, 2.0),
        ("choice question: where   ?", ["York: a town", "in", "déjà: 東京"], 0, 0.8),
        ("score question: how far?", ["level 0: near", "level 1: far"], 1, 5.0),
        ("choice question: many", [f"word{n}: Angela met" for n in range(7)], 0, 1.5),
    ]
    questions = [
        QUESTIONS[0],
        Question.choice(f"where {MARK} ?", {"York": "a town", "in": "", "déjà": "東京"}),
        Question.score("how far?", ["near", "far"]),
        Question.choice("many", {f"word{n}": "Angela met" for n in range(7)}),
    ]
    with engine.Engine.load(str(tmp_path), device="cpu") as loaded:
        assert loaded.model.task_names == ["decide"]
        decided = loaded.decide(STATE * 4, questions)
        for (question, options, kind, temperature), decision in zip(wanted, decided, strict=True):
            logits = np.array(laya_logits(tmp_path, models, question, options, kind)) / temperature
            expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            if kind == 2:
                expected = expected[::-1]
            np.testing.assert_allclose(decision.probabilities, expected, atol=1e-4)
        assert [loaded.decide(STATE * 4, [each])[0] for each in questions] == decided
        with pytest.raises(InputError, match="question 0 has 20 options"):
            loaded.decide(STATE, [Question.choice("many", [f"word{n}" for n in range(20)])])
        with pytest.raises(InputError, match="the limit is 60"):
            loaded.decide(STATE * 4, questions, truncate=False)
        with pytest.raises(InputError, match="language models"):
            loaded.decide(STATE, questions, label_mass=True)
    assert refusal(loaded.model) is None
