"""Small late-interaction models in the files of sentence-transformers, PyLate and Stanford's ColBERT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tests.engine.conftest import Floats, Ids, unit
from tests.oracles.model_cases import build, list_modules

COLUMNS = 24
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(*, markers: bool = False) -> Backend:
    """BERT's kind of tokenizer: letters, some punctuation, Stanford's markers, and on request PyLate's."""
    tokens = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"!?.,'"]
    tokenizer = Backend(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    if markers:
        tokenizer.add_tokens([AddedToken("[Q] "), AddedToken("[D] ")])  # PyLate's, which texts never match
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write what transformers needs next to a tokenizer.json."""
    path = str(folder / "tokenizer.json")
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("cls", "sep", "pad", "unk", "mask")}
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(tokenizer_file=path, model_max_length=128, **names).save_pretrained(folder)


def encoder(folder: Path, *, case: str = "bert", markers: bool = False, **shape: Any) -> Path:
    """A random encoder in `folder`, with the tokenizer of `words`. `shape` is more of its config."""
    folder.mkdir(exist_ok=True)
    backend = words(markers=markers)
    build(folder, case, vocab_size=backend.get_vocab_size(), modules=False, pad_token_id=0, **shape)
    backend.save(str(folder / "tokenizer.json"))
    save_tokenizer(folder)
    return folder


def linear(columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(columns, 64, generator=torch.Generator().manual_seed(1)) * 0.2


# Lengths of sequences, and numbers of mask tokens after them, that expand queries without being attended to.
EXPANDED = ((3, 17), (20, 0), (9, 91), (20, 3), (1, 99), (97, 3), (40, 40), (20, 80))


def expanded_sequences() -> list[Ids]:
    random = np.random.default_rng(0)
    return [
        np.concatenate([random.integers(5, 60, known), np.full(added, SPECIAL.index("[MASK]"))]).astype(np.int32)
        for known, added in EXPANDED
    ]


def masked_vectors(folder: Path, sequences: Sequence[Ids]) -> list[Floats]:
    """The vectors of `expanded_sequences` by transformers' attention mask."""
    model: Any = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for ids, (known, _) in zip(sequences, EXPANDED, strict=True):
        attended = (torch.arange(len(ids)) < known).long()
        with torch.inference_mode():  # twice: LFM2 ignores the mask of a single text
            hidden = model(torch.from_numpy(ids.astype(np.int64)).repeat(2, 1), attended.repeat(2, 1))
        vectors.append(unit((hidden.last_hidden_state[0] @ linear().T).numpy()))
    return vectors


def pylate(folder: Path, *, case: str = "bert", shape: dict[str, Any] | None = None, **config: Any) -> Path:
    """PyLate's files, with `config` in config_sentence_transformers.json."""
    encoder(folder, case=case, markers=True, **(shape or {}))
    list_modules(folder, ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"))
    (folder / "1_Dense").mkdir()
    fields = {
        "in_features": 64, "out_features": COLUMNS, "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity", "use_residual": False,
    }  # fmt: skip
    (folder / "1_Dense" / "config.json").write_text(json.dumps(fields))
    save_file({"linear.weight": linear()}, folder / "1_Dense" / "model.safetensors")
    # What PyLate leaves there is the length of whatever it encoded last.
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 17, "do_lower_case": false}')
    usual: dict[str, Any] = {
        "model_type": "ColBERT", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 20, "document_length": 40,
        "attend_to_expansion_tokens": False, "do_query_expansion": True, "skiplist_words": ["!", "?", ".", ",", "#"],
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**usual, **config}))
    return folder


def stanford(folder: Path, **metadata: Any) -> Path:
    """Stanford's files, with `metadata` in artifact.metadata."""
    encoder(folder)
    path = folder / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "linear.weight": linear()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    usual = {"query_maxlen": 20, "doc_maxlen": 40, "mask_punctuation": True, "attend_to_mask_tokens": False}
    (folder / "artifact.metadata").write_text(json.dumps({**usual, **metadata}))
    return folder
