"""Decoders as embedders and rerankers compared with sentence-transformers; test_model_types.py has their layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from embert import engine
from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.errors import InputError, InputTooLarge, UnsupportedModel
from embert.engine.files.chat_template import read_pair_text
from embert.engine.files.tokenizer_config import QWEN_PATTERN
from embert.engine.heads.checkpoints.classifier import read_classifier
from embert.engine.heads.description import Classifier
from embert.engine.models import read_config
from embert.engine.models.encoder_config import Attention, Rotary
from embert.engine.tokenization.encoded import TokenizeOptions, finish
from tests.engine.conftest import random_sequences, small_tokenizer
from tests.engine.heads.classifiers import build_classifier, hugging_face_logits
from tests.oracles.exact import cosines, hidden_states
from tests.oracles.model_cases import MODEL_CASES, build, hugging_face, write_modules
from tests.oracles.sentences import cross_encoder, embeddings, logits, sentence_transformer
from tests.server.models import edit_json

TEXTS = [
    "What is the capital of China?", "a", " two  spaces, and\n\nlines\t", "it's <|endoftext|> inside",
    "déjà vu, 東京は日本の首都です, 1234567 e\u0301", "def build(folder: Path) -> Path:\n    return folder\n" * 30,
]  # fmt: skip
VOCABULARY = 400


def trained(tokenizer: Backend, special: list[str]) -> Backend:
    byte_level = '"ByteLevel"' in tokenizer.to_str()
    pieces = pre_tokenizers.ByteLevel.alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 20, special_tokens=special, initial_alphabet=list(pieces))
    if not byte_level:
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 20, special_tokens=[*special, *pieces])
    tokenizer.train([__file__], trainer)
    if byte_level:
        return tokenizer
    described = json.loads(tokenizer.to_str())  # the bytes are not special tokens
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in special]
    return Backend.from_str(json.dumps(described))


def qwen() -> tuple[Backend, dict[str, Any]]:
    """Qwen3-Embedding's: its template puts the end token after each text."""
    tokenizer = Backend(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = trained(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, [("<|endoftext|>", 0)])
    fields = {
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "errors": "replace",
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None,
        "split_special_tokens": False, "model_max_length": 131072, "chat_template": "{{ messages }}",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }  # fmt: skip
    return tokenizer, fields


def eurobert() -> tuple[Backend, dict[str, Any]]:
    """EuroBERT's: byte-level as Llama 3's, with tokenizer.json as it stands."""
    tokenizer, _ = qwen()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A <|im_end|>",
        "<|im_start|> $A <|im_end|> $B <|im_end|>",
        [("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, **names}


def gemma() -> tuple[Backend, dict[str, Any]]:
    tokenizer = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer = trained(tokenizer, ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A <eos>", None, [("<bos>", 2), ("<eos>", 1)])
    return tokenizer, {"tokenizer_class": "GemmaTokenizer", "model_max_length": 2048, "add_bos_token": True}


def llama() -> tuple[Backend, dict[str, Any]]:
    """e5-mistral's, and Llama 2's."""
    tokenizer = Backend(models.BPE(fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = trained(tokenizer, ["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return tokenizer, {"tokenizer_class": "LlamaTokenizer", "pad_token": "</s>", "legacy": True}


def write_tokenizer(folder: Path, kind: Any, *tokens: str, bare: bool = False, **more: Any) -> Backend:
    """Writes a tokenizer with added `tokens`, and more fields of its config. `bare`: it puts nothing around texts."""
    backend: Backend
    backend, fields = kind()
    if bare:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_tokens([*tokens])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, **more}))
    return backend


def embedder(folder: Path, case: str, tokenizer: Any, **prompts: str) -> Path:
    """Writes a decoder as sentence-transformers stores it: the last token's row, and a Normalize module."""
    build(folder, case, vocab_size=VOCABULARY, modules=False)
    write_tokenizer(folder, tokenizer)
    pooling = "mean" if case.startswith("gemma") else "lasttoken"
    write_modules(folder, pooling={"word_embedding_dimension": 64, "pooling_mode": pooling, "include_prompt": True})
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100, "do_lower_case": False}))
    stated = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    return folder


CASES = [
    ("qwen3", qwen), ("qwen2, both ways", qwen), ("mistral", llama), ("llama, llama3", qwen), ("llama", llama),
    ("gemma3_text", gemma), ("eurobert", eurobert),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tokenizer"), CASES, ids=[case for case, _ in CASES])
def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path, case: str, tokenizer: Any) -> None:
    """Ids with the tokenizer's own end token, with and without a prompt, and cut to 100 tokens; narrower vectors."""
    query = "Instruct: Given a question, find passages\nQuery:"
    folder = embedder(tmp_path, case, tokenizer, query=query)
    oracle = sentence_transformer(folder)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        for prompt in (None, "query"):
            expected = np.concatenate([oracle.encode([text], prompt_name=prompt) for text in TEXTS])
            vectors = loaded.embed(TEXTS, prompt_name=prompt)
            np.testing.assert_allclose(vectors, expected, atol=2e-5)
        narrow = oracle.encode(TEXTS[:1], truncate_dim=16)
        narrow /= np.linalg.norm(narrow)
        np.testing.assert_allclose(loaded.embed(TEXTS[:1], dimensions=16), narrow, atol=2e-5)


@pytest.mark.parametrize("case", ["qwen3", "llama"])
def test_a_reranker_takes_the_last_token_that_is_not_padding(tmp_path: Path, case: str) -> None:
    folder = build_classifier(tmp_path, case, labels=1, pad_token_id=7)
    sequences = [*random_sequences([1, 5, 30], 90), *(np.array(ids, np.int32) for ids in ([7], [7, 7], [8, 9, 7, 7]))]
    encoder = engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    expected = hugging_face_logits(folder, sequences)
    for batch, wanted in ((sequences, expected), (sequences[:3], expected[:3]), (sequences[5:], expected[5:])):
        logits = encoder.encode(engine.pack(batch), engine.Task.CLASSIFY)
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_scores_of_pairs_are_those_of_cross_encoder(tmp_path: Path) -> None:
    build(tmp_path, "qwen3", vocab_size=VOCABULARY, head="ForSequenceClassification", modules=False,
          num_labels=1, pad_token_id=0)  # fmt: skip
    write_tokenizer(tmp_path, qwen, bare=True, model_max_length=60, chat_template=None)
    pairs = [("what is it", "a document"), ("short", "many words " * 30), ("words " * 50, "b"), ("a", "c")]
    expected = logits(tmp_path, pairs)
    with engine.Engine.load(str(tmp_path), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.score(pairs, raw=True), expected, atol=1e-4)
        with pytest.raises(InputError, match="pair 1 has no tokens"):
            loaded.score([("a", "b"), ("", "")])
    named = {"AutoModel": "modeling_own.BothWays"}
    edit_json(tmp_path / "config.json", auto_map=named)
    assert any("auto_map" in notice for notice in engine.load_model(str(tmp_path)).notices)
    edit_json(tmp_path / "config.json", is_causal=False)
    assert not any("auto_map" in notice for notice in engine.load_model(str(tmp_path)).notices)


def test_padding_of_a_gemma_classifier_by_default(tmp_path: Path) -> None:
    """transformers' default is 0 for this model_type only."""
    for case, expected in (("gemma3_text", 0), ("qwen3", None)):
        folder = build(tmp_path / case, case, vocab_size=VOCABULARY, head="ForSequenceClassification", modules=False,
                       num_labels=1)  # fmt: skip
        fields = json.loads((folder / "config.json").read_text())
        fields.pop("pad_token_id", None)
        (folder / "config.json").write_text(json.dumps(fields))
        classifier = read_classifier(folder, folder, read_config(folder / "config.json"))
        assert isinstance(classifier, Classifier)
        assert classifier.padding_id == expected


POOLINGS = [
    *(("eurobert", each) for each in ("late", "mean", "bos")),
    *(("ultrabert", each) for each in ("cls", "mean")),
]


@pytest.mark.parametrize(("case", "pooling"), POOLINGS)
def test_a_decoder_that_classifies_or_fills_masks(tmp_path: Path, case: str, pooling: str) -> None:
    """Classes of pairs are those of CrossEncoder; the encoder of a masked language model embeds."""
    for head in ("ForSequenceClassification", "ForMaskedLM"):
        folder = build(tmp_path / head, case, vocab_size=VOCABULARY, head=head, modules=False, num_labels=3,
                       classifier_pooling=pooling)  # fmt: skip
        write_tokenizer(folder, eurobert, model_max_length=60)
    pairs = [("what is it", "a document"), ("short", "many words " * 30), ("a", "c")]
    folder = tmp_path / "ForSequenceClassification"
    expected = logits(folder, pairs)
    (folder / "chat_template.jinja").write_text(RERANKER_TEMPLATE)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        assert any("chat template is for models of one label" in notice for notice in loaded.model.notices)
        outputs = [{each.label: each.score for each in output} for output in loaded.classify(pairs, raw=True)]
    scores = [[output[f"LABEL_{label}"] for label in range(3)] for output in outputs]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    folder = tmp_path / "ForMaskedLM"
    with engine.Engine.load(str(folder), device="cpu", pooling="mean") as loaded:
        vectors = embeddings(folder, TEXTS[:3], normalize_embeddings=True)  # the mean, where no file says it
        np.testing.assert_allclose(loaded.embed(TEXTS[:3]), vectors, atol=2e-5)
    with pytest.raises(UnsupportedModel, match=f"pooling splade is not supported for {case}"):
        engine.load_model(str(folder), pooling="splade")


def test_both_spellings_of_ultrabert(tmp_path: Path) -> None:
    """A list with the window and one with the θ of each layer, instead of types of layers."""
    path = build(tmp_path, "ultrabert, lists") / "config.json"
    read, fields = read_config(path), json.loads(path.read_text())
    for name in ("layer_types", "sliding_window", "rope_parameters"):
        del fields[name]
    path.write_text(json.dumps({**fields, "attention_windows": [0, 5], "rope_theta": [300.0, 70.0]}))
    assert read_config(path) == read
    assert read.attention == (Attention(Rotary(300.0, 16)), Attention(Rotary(70.0, 16), 5))
    del fields["num_hidden_layers"]
    path.write_text(json.dumps(fields))
    assert [each.window for each in read_config(path).attention[:4]] == [128, 128, None, 128]


# As Qwen3-Reranker's.
RERANKER_TEMPLATE = """<|im_start|>system
Judge the document.<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Find.") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
{%- if add_generation_prompt %}
<|im_start|>assistant
<think>

</think>

{% endif %}"""
PAIRS = [
    ("what is it", "a document"),
    ("short", "many words " * 60),
    ("words " * 70, "b"),
    ("a", ""),
    (" x \n", " y <|im_end|> z "),
    ("déjà vu", "東京は日本の首都です"),
]


def reranker(folder: Path, case: str, *, false_token: bool, prompt: str | None, **config: Any) -> Any:
    """A language model that scores pairs by two of its logits, as sentence-transformers stores it."""
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    build(folder / "raw", case, vocab_size=VOCABULARY, head="ForCausalLM", modules=False, **config)
    write_tokenizer(folder / "raw", qwen, bare=True, model_max_length=90, chat_template=RERANKER_TEMPLATE)
    transformer = Transformer(
        str(folder / "raw"),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    scores = LogitScore(true_token_id=70, false_token_id=90 if false_token else None)
    prompts = {"query": prompt} if prompt else None
    modules, name = [transformer, scores], "query" if prompt else None
    oracle = cross_encoder(None, modules=modules, prompts=prompts, default_prompt_name=name)
    oracle.save_pretrained(str(folder / "saved"))
    return oracle


QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n",
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 "
    "for not relevant, 1 for relevant).\nRelevance:",
    "<|im_end|>\n<|im_start|>assistant\n",
)
BGE = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
WEB = "Given a web search query, retrieve relevant passages that answer the query"


def parts_of_pair(name: str, query: str, document: str, instruction: str | None) -> list[str]:
    """The texts that the code of a published reranker tokenizes one by one."""
    match name:
        case "Qwen3-Reranker-0.6B":
            body = f"<Instruct>: {instruction or WEB}\n<Query>: {query}\n<Document>: {document}"
            return [QWEN3_RERANKER[0], body, QWEN3_RERANKER[1]]
        case "mxbai-rerank-base-v2":
            asked = f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
            return [MXBAI[0], asked, "\n", f"document: {document}", "\n", MXBAI[1], MXBAI[2]]
        case _:
            return ["<bos>", f"A: {query}", "\n", f"B: {document}", "\n", BGE]


@pytest.mark.parametrize(
    ("name", "case", "tokenizer", "tokens"),
    [
        ("Qwen3-Reranker-0.6B", "qwen3", qwen, ("yes", "no")),
        ("mxbai-rerank-base-v2", "qwen2", qwen, ("1", "0")),
        ("bge-reranker-v2-gemma", "gemma", gemma, ("Yes",)),
    ],
)
def test_published_rerankers(tmp_path: Path, name: str, case: str, tokenizer: Any, tokens: tuple[str, ...]) -> None:
    """Language models without modules.json, known by README.md or by the folder's name."""
    folder = build(tmp_path / "model", case, vocab_size=VOCABULARY, head="ForCausalLM", modules=False,
                   max_position_embeddings=2048)  # fmt: skip
    backend = write_tokenizer(folder, tokenizer, "yes", "no", "Yes", bare=True, model_max_length=2048)
    with pytest.raises(UnsupportedModel, match="generates text"):
        engine.load_model(str(folder))
    (folder / "README.md").write_text(f"---\nbase_model: somebody/{name}\n---\n# Ours\n")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    pairs = [("what is it", "a document"), ("short", "many words " * 30), ("déjà vu", "東京は日本")]
    ids = [[i for part in parts_of_pair(name, *pair, None) for i in backend.encode(part).ids] for pair in pairs]
    columns = [backend.token_to_id(token) for token in tokens]
    with torch.inference_mode():
        logits = [reference(torch.tensor([each])).logits[0, -1, columns].numpy() for each in ids]
    expected = [float(each[0] - (each[1] if len(each) > 1 else 0)) for each in logits]
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        assert "rerank" in loaded.model.task_names
        np.testing.assert_allclose(loaded.score(pairs, raw=True), expected, atol=1e-4)
        for index, pair in enumerate(pairs):
            np.testing.assert_array_equal(loaded.score([pair], raw=True), loaded.score(pairs, raw=True)[index])
        options = TokenizeOptions(instruction="Find code.\n", truncate=True, limit=500)
        if name.startswith("bge"):
            with pytest.raises(InputError, match="`instruction` is not read by this model"):
                loaded.tokenizer.encode_pairs(["a"], ["b"], options)
            return
        encoded = loaded.tokenizer.encode_pairs(["a"], ["b"], options)
        wanted = [i for part in parts_of_pair(name, "a", "b", "Find code.\n") for i in backend.encode(part).ids]
        assert encoded.ids.tolist() == wanted
        with pytest.raises(InputError, match=r"`instruction` has 4000 characters, and more than .* tokens.*limit is "):
            loaded.tokenizer.encode_pairs(["a"], ["b"], TokenizeOptions(instruction="a b " * 1000, limit=500))
    (folder / "README.md").unlink()
    assert engine.load_model(str(folder.rename(tmp_path / name))).pair_text == loaded.model.pair_text


@pytest.mark.parametrize(
    ("case", "false_token", "prompt", "config"),
    [
        ("qwen3", True, None, {"tie_word_embeddings": True}),
        ("qwen3", True, "Judge well.", {}),
        ("llama", False, None, {}),
        ("gemma3_text", True, None, {}),
    ],
)
def test_scores_of_a_language_model_are_those_of_cross_encoder(
    tmp_path: Path, case: str, false_token: bool, prompt: str | None, config: dict[str, Any]
) -> None:
    oracle = reranker(tmp_path, case, false_token=false_token, prompt=prompt, **config)
    expected = np.concatenate([oracle.predict([pair]) for pair in PAIRS])
    assert np.ptp(expected) > 0.01
    if case == "gemma3_text":  # the library's default is a tied matrix
        fields = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert fields.pop("tie_word_embeddings")
        (tmp_path / "saved" / "config.json").write_text(json.dumps(fields))
    with engine.Engine.load(str(tmp_path / "saved"), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.score(PAIRS), expected, atol=2e-5)
        assert loaded.rerank("what is it", ["a document", "b"])
        with pytest.raises(InputError, match="query"):
            loaded.classify(["a single text"])


def instructed_models(parent: Path) -> tuple[Path, Path]:
    """A published reranker, and an embedder whose prompt of queries has an instruction."""
    folders = parent / "ranks", parent / "embeds"
    for folder, case, head in zip(folders, ("qwen3", "qwen2"), ("ForCausalLM", "Model"), strict=True):
        build(folder, case, vocab_size=400, head=head, modules=head == "Model", max_position_embeddings=512)
        write_tokenizer(folder, qwen, "yes", "no", model_max_length=512)
    prompts = {"query": "Instruct: Find it.\nQuery:", "document": ""}
    (folders[0] / "README.md").write_text("# Qwen3-Reranker-0.6B\n")
    (folders[1] / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return folders


def test_texts_of_a_template_are_cut_in_chunks(tmp_path: Path) -> None:
    reranker(tmp_path, "qwen3", false_token=True, prompt=None)
    tokenizer = engine.Tokenizer(engine.load_model(str(tmp_path / "saved")), most_unbroken=2000)
    words = "a few words of a document, and 17 more " * 200
    (tokens,) = tokenizer.tokenize([words], add_special_tokens=False)
    for limit in (1, 7, 30):
        cut = words[: tokens[limit - 1].stop]
        expected = tokenizer.encode_pairs(["what is it"], [cut, "a"])
        found = finish(tokenizer.encode_pairs_chunks(["what is it"], [words, "a"], TokenizeOptions(second_limit=limit)))
        np.testing.assert_array_equal(found.ids, expected.ids)
    with pytest.raises(InputTooLarge, match="2000 of them"):
        finish(tokenizer.encode_pairs_chunks(["a"], ["xq" * 50_000], TokenizeOptions(second_limit=25_000)))


@pytest.mark.parametrize(
    ("template", "used"),
    [
        (RERANKER_TEMPLATE, True),
        ("{% for message in messages %}{{ message.role }}: {{ message.content[0].text }}\n{% endfor %}", True),
        ("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}", False),
    ],
)
def test_a_reranker_with_a_template_and_no_modules(tmp_path: Path, template: str, *, used: bool) -> None:
    """CrossEncoder puts pairs into the template. It refuses one that takes none, with which embert does without."""
    build(tmp_path, "qwen3", vocab_size=VOCABULARY, head="ForSequenceClassification", modules=False,
          num_labels=1, pad_token_id=0)  # fmt: skip
    write_tokenizer(tmp_path, qwen, bare=True, model_max_length=90, chat_template=template)
    model = engine.load_model(str(tmp_path))
    assert any("chat template does not take a query" in notice for notice in model.notices) != used
    if not used:
        write_tokenizer(tmp_path, qwen, bare=True, model_max_length=90, chat_template=None)
    expected = logits(tmp_path, PAIRS)
    with engine.Engine.load(model, device="cpu") as loaded:
        np.testing.assert_allclose(loaded.score(PAIRS, raw=True), expected, atol=1e-4)


def test_a_long_query_of_many_documents_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query is never in memory once for each document, and a server sees the tokens before all exist."""
    reranker(tmp_path, "qwen3", false_token=True, prompt=None)
    tokenizer = engine.Tokenizer(engine.load_model(str(tmp_path / "saved")))
    query, documents = ["words " * 5_000], [f"document {number}" for number in range(12)]
    backend: Any = tokenizer._backend
    read, characters = backend.read, []

    def noting(texts: list[str], *arguments: Any, **options: Any) -> Any:
        characters.append(sum(map(len, texts)))
        return read(texts, *arguments, **options)

    monkeypatch.setattr(backend, "read", noting)
    steps, known = tokenizer.encode_pairs_chunks(query, documents, TokenizeOptions(truncate=True)), []
    try:
        while True:
            known.append(next(steps))
    except StopIteration as end:
        encoded = end.value
    assert known[-1] >= 90 * 11
    assert max(characters) < 3 * len(query[0])
    assert encoded.truncated == 12
    whole = tokenizer.encode_pairs(query, documents, TokenizeOptions(truncate=True))
    np.testing.assert_array_equal(encoded.ids, whole.ids)
    with pytest.raises(InputError, match="pair 11 "):
        tokenizer.encode_pairs(["a"] * 12, ["b"] * 11 + query, TokenizeOptions(truncate=False, param="a"))


def test_windows_of_qwen_are_those_of_transformers_where_config_has_no_width(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    windows = [attention.window for attention in read_config(tmp_path / "config.json").attention]
    reference: Any = getattr(transformers, "Qwen3Config")  # noqa: B009  # its type is not exported
    assert reference(**fields).sliding_window == 4096
    assert windows == [None] * 30 + [4095] * 2


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content | trim }} {{ messages[1].content }}", "more than put text around"),
        ("{{ messages[0].content }}", "does not take a query and a document"),
        ("{{ messages[0].content | upper }} {{ messages[1].content }}", "more than put text around"),
        ("{{ messages[1].content }} {{ messages[0].content }}", "more than put text around"),
        ("{{ raise_exception('no roles') }}", "no roles"),
        ("{% if %}", "does not take a query and a document"),
        ("{{ messages[0].content * 10**10 }}", "1024 MiB"),
        ("{% for _ in range(2000) %}{{ messages[0].content }}{{ 'a' * 1000 }}{% endfor %}", "1048576 characters"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too long"),
        ("{{ 1|tojson(cls=namespace) }}", "unexpected keyword argument 'cls'"),
    ],
)
def test_templates_that_are_refused(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_pair_text(tmp_path, template, structured=False, prompt="", variables={})


def test_options_of_tojson_are_those_of_transformers(tmp_path: Path) -> None:
    """Published templates put tools into JSON with them."""
    template = (
        "{{ {'b': 'ä', 'a': 1}|tojson(ensure_ascii=true, indent=1, separators=(';', '='), sort_keys=true) }}"
        "{{ messages[0].content }} {{ messages[1].content }}"
    )
    pair_text = read_pair_text(tmp_path, template, structured=False, prompt="", variables={})
    assert pair_text.before == '{\n "a"=1;\n "b"="\\u00e4"\n}'


BOTH_WAYS = {"use_bidirectional_attention": True}


@pytest.mark.parametrize(
    ("case", "tokenizer", "fields", "wanted"),
    [
        *(
            (case, tokenizer, fields, wanted)
            for case, tokenizer in (("llama", llama), ("qwen3", qwen))
            for fields, wanted in (
                (BOTH_WAYS, {}),
                ({"auto_map": {"AutoModel": "modeling.Both"}, **BOTH_WAYS}, {"is_causal": False}),
            )
        ),
        ("mistral", llama, {"layer_types": ["full_attention", "sliding_attention"]}, None),
    ],
)
def test_fields_that_other_model_types_have(
    tmp_path: Path, case: str, tokenizer: Any, fields: dict[str, Any], wanted: dict[str, Any] | None
) -> None:
    """transformers ignores Gemma's field in other decoders, but in models that have their own code.

    It takes a Mistral with Ministral's field for one. `wanted` are the fields of the model compared with.
    """
    folder = embedder(tmp_path, case, tokenizer)
    config = (folder / "config.json").read_text()
    edit_json(folder / "config.json", **(fields if wanted is None else wanted))
    texts = [TEXTS[0], TEXTS[-1]]  # the last one is longer than a window
    expected = embeddings(folder, texts)
    (folder / "config.json").write_text(config)
    edit_json(folder / "config.json", **fields)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.embed(texts), expected, atol=2e-5)
    assert any("use_bidirectional_attention" in notice for notice in loaded.model.notices) == (wanted == {})


def test_text_part_of_mistral3_reranks(tmp_path: Path) -> None:
    """Tensors for images are left out; the score is of the mean of the rows, as in NVIDIA's code."""
    torch.manual_seed(0)
    text: Any = {**MODEL_CASES["ministral3"][1], "vocab_size": VOCABULARY, "initializer_range": 0.3}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = hugging_face("Mistral3Config")(
        text_config={"model_type": "ministral3", **text}, vision_config={"model_type": "pixtral", **vision}
    )
    reference: Any = hugging_face("Mistral3Model")(config)
    for name, parameter in reference.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    score = torch.randn(1, 64)
    sequences = random_sequences([1, 30, 100], VOCABULARY)
    with torch.inference_mode():
        rows = [reference(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0] for ids in sequences]
        expected = np.stack([(each.mean(0) @ score.T).numpy() for each in rows])
    for prefix, head in (("model.", "score"), ("", "language_model.score")):
        folder = tmp_path / head
        reference.save_pretrained(folder)
        stored = {f"{prefix}{name}": tensor for name, tensor in reference.state_dict().items()}
        save_file({**stored, f"{head}.weight": score}, folder / "model.safetensors")
        edit_json(folder / "config.json", architectures=["Mistral3ForSequenceClassification"], pooling="avg",
                  id2label={"0": "LABEL_0"})  # fmt: skip
        write_tokenizer(folder, llama)
        model = engine.load_model(str(folder))
        assert model.task_names == ["classify", "rerank"]
        assert any("tensors that nothing uses" in notice for notice in model.notices)
        encoder = engine.load_encoder(model, device="cpu")
        logits = encoder.encode(engine.pack(sequences), engine.Task.CLASSIFY)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    edit_json(folder / "config.json", architectures=["Mistral3ForConditionalGeneration"])
    with pytest.raises(UnsupportedModel, match="generates text"):
        engine.load_model(str(folder))
    edit_json(folder / "config.json", text_config={"model_type": "llama"})
    with pytest.raises(UnsupportedModel, match=r"text_config: model_type 'llama'"):
        engine.load_model(str(folder))


def test_linear_layer_of_voyage_and_whole_numbers_of_pplx(tmp_path: Path) -> None:
    """Their own code projects each row before the mean, or rounds the mean's hyperbolic tangent."""
    sequences = random_sequences([1, 5, 40], 60)
    voyage = build(tmp_path / "voyage", "qwen3", is_causal=False)
    expected = [rows.mean(0) for rows in hidden_states(voyage, sequences)]
    stored = load_file(voyage / "model.safetensors")
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    prefixed = {f"model.{name}": tensor for name, tensor in stored.items()}
    save_file({**prefixed, "linear.weight": weight}, voyage / "model.safetensors")
    small_tokenizer(64).save(str(voyage / "tokenizer.json"))
    named = {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}
    edit_json(voyage / "config.json", is_causal=True, architectures=["Qwen3ForCausalLM"], auto_map=named)
    config = read_config(voyage / "config.json")
    assert config.causal is False
    edit_json(voyage / "config.json", auto_map=None, use_bidirectional_attention=True)
    edit_json(voyage / "config.json", architectures=["Qwen3BidirectionalModel"])
    assert read_config(voyage / "config.json") == config
    model = engine.load_model(str(voyage))
    assert (model.width, [notice for notice in model.notices if "nothing uses" in notice]) == (96, [])
    projected = np.stack(expected) @ weight.numpy().T.astype(np.float64)
    projected /= np.linalg.norm(projected, axis=1, keepdims=True)
    np.testing.assert_allclose(engine.load_encoder(model, device="cpu").encode(engine.pack(sequences)), projected,
                               atol=1e-5)  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"linear\.weight .*pooling max"):
        engine.load_model(str(voyage), pooling="max")

    pplx = build(tmp_path / "pplx", "bidirectional_pplx_qwen3")
    write_modules(pplx, normalize=False)
    modules = json.loads((pplx / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"})
    (pplx / "modules.json").write_text(json.dumps(modules))
    small_tokenizer(64).save(str(pplx / "tokenizer.json"))
    means = np.stack([rows.mean(0) for rows in hidden_states(pplx, sequences)])
    model, as_they_are = engine.load_model(str(pplx)), np.zeros(3, np.bool_)
    assert model.whole_numbers
    encoder = engine.load_encoder(model, device="cpu")
    vectors = encoder.encode(engine.pack(sequences, normalize=as_they_are))
    np.testing.assert_array_equal(vectors, np.rint(vectors))
    assert np.abs(vectors - 127 * np.tanh(means)).max() < 0.501
    for index, ids in enumerate(sequences):
        alone = encoder.encode(engine.pack([ids], normalize=as_they_are[:1]))
        np.testing.assert_array_equal(alone[0], vectors[index])


def test_a_language_model_embeds_only_where_it_is_asked_to(tmp_path: Path) -> None:
    build(tmp_path, "qwen3", vocab_size=VOCABULARY, head="ForCausalLM", modules=False)
    write_tokenizer(tmp_path, qwen)
    with pytest.raises(UnsupportedModel, match=r"Qwen3ForCausalLM .*--pooling last-token"):
        engine.load_model(str(tmp_path))
    model = engine.load_model(str(tmp_path), pooling="last-token")
    sequences = random_sequences([3, 40], 300)
    reference: Any = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        rows = [reference(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0, -1] for ids in sequences]
    expected = torch.nn.functional.normalize(torch.stack(rows)).numpy()
    vectors = engine.load_encoder(model, device="cpu").encode(engine.pack(sequences))
    np.testing.assert_allclose(vectors, expected, atol=2e-5)


def test_text_part_of_embedding_gemma2(tmp_path: Path, products: str) -> None:
    """With the projection of every row, heads of 512 columns, and tensors of a part for images, which are left out."""
    folder = build(tmp_path, "embedding_gemma2", vocab_size=VOCABULARY, embedding_dim=40, global_head_dim=512)
    write_modules(folder, pooling={"pooling_mode": "mean", "embedding_dimension": 40})
    small_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    path, projection = folder / "model.safetensors", "language_model.embedding_projection.weight"
    stored = {**load_file(path), projection: torch.randn(40, 64, generator=torch.Generator().manual_seed(1))}
    save_file(stored, path, {"format": "pt"})
    sequences = random_sequences([1, 9, 30, 30, 100], VOCABULARY)
    expected = np.stack([rows.mean(0) for rows in hidden_states(folder, sequences)])
    encoder = engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    vectors = encoder.encode(engine.pack(sequences))
    assert cosines(vectors, expected).min() >= 0.99999
    for ids, vector in zip(sequences, vectors, strict=True):
        alone = encoder.encode(engine.pack([ids]))[0]
        np.testing.assert_allclose(alone, vector, rtol=0, atol=0 if products == "kernels" else 1e-5)
    save_file({**stored, "vision_tower.encoder.weight": torch.ones(1)}, path, {"format": "pt"})
    model = engine.load_model(str(folder))
    (notice,) = model.notices
    assert "vision_tower (1)" in notice
    np.testing.assert_array_equal(engine.load_encoder(model, device="cpu").encode(engine.pack(sequences)), vectors)
    assert refusal(model) is None
    assert "has heads of 512 columns, over 256, which the CUDA encoder does not run in float32" in str(
        refusal(model, "float32")
    )
