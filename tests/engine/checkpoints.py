"""Folders as other people write them: a small model with all of sentence-transformers' files, each of which may be odd.

sentence-transformers is the oracle: see `check`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from embert import engine
from embert.engine.errors import ModelError
from tests.oracles.sentences import embeddings

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
WORDS = [
    *SPECIAL.values(),
    *("hello", "world", "Hello", "World", "the", "cat", "café", "cafe", "中", "中国", "<s>", "</s>", "<pad>", "<mask>"),
    *LETTERS, *(f"##{letter}" for letter in (*LETTERS, "é")),
]  # fmt: skip
SENTENCE_PIECES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[CLS]", "[SEP]", "▁", "▁hello", "▁h", "llo", *LETTERS]
LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2
TEXTS = ["hello world", "Hello World", "café", "中国", "the [MASK] cat", LONG]
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 66,
}  # fmt: skip


def word_piece(**normalizer: Any) -> Backend:
    """BERT's kind of tokenizer. The keyword arguments are BertNormalizer's."""
    tokenizer = Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(WORDS[:5])
    return tokenizer


def byte_level(**options: Any) -> Backend:
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    for letter in [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġh", "he"]:
        vocabulary[letter] = len(vocabulary)
    tokenizer = Backend(models.BPE(vocabulary, [("Ġ", "h"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens([*vocabulary][:5])
    return tokenizer


def unigram(normalizer: normalizers.Normalizer | None = None, **options: Any) -> Backend:
    tokenizer = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(SENTENCE_PIECES)], 3))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    tokenizer.add_special_tokens(SENTENCE_PIECES[:5])
    return tokenizer


def write(
    folder: Path,
    *,
    prefix: str = "Bert",
    head: str = "Model",
    tokenizer: Backend | None = None,
    files: Mapping[str, Any] | None = None,
    further: Sequence[tuple[str, str]] = (),
    without: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A model of random weights in a new `folder`, with further `files` as JSON (None: no such file).

    `prefix` and `config` are the prefix of transformers' classes and fields of the config, of which config.json then
    lacks those of `without`. `head` is the rest of the model's class. `further` are modules after pooling: folders and
    classes.
    """
    folder.mkdir()
    tokenizer = tokenizer or word_piece()
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": tokenizer.get_vocab_size(), **config}
    model = getattr(transformers, f"{prefix}{head}")(getattr(transformers, f"{prefix}Config")(**shape))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data = torch.randn_like(parameter) * 0.2 + ("norm" in name.lower() and name.endswith("weight"))
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: stored[name] for name in stored if name not in without}))
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *further]
    usual: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": f"{prefix}Tokenizer", "model_max_length": 512},
        "sentence_bert_config.json": {"max_seq_length": 64},
        "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "mean"},
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
    }
    for name, content in {**usual, **(files or {})}.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
    return folder


def check(folder: Path, texts: Sequence[str] = TEXTS, *, refusal: str | None = None) -> None:
    """Assert that vectors are sentence-transformers'; with a `refusal`, that the model is refused by such a message."""
    if refusal is not None:
        with pytest.raises(ModelError, match=re.escape(refusal)):
            engine.Engine.load(str(folder), device="cpu")
        return
    # Padding on the left moves BERT's positions by the lengths of other texts.
    expected = embeddings(folder, texts, normalize_embeddings=True)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        vectors = loaded.embed(texts)
    assert vectors.shape == expected.shape
    cosines = (vectors * expected).sum(1)
    np.testing.assert_array_less(1 - 1e-6, cosines, err_msg=f"of {texts}")
