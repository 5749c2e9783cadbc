"""bge-m3's sparse and multi-vector heads, which have separate files beside a dense model."""

from __future__ import annotations

from pathlib import Path

from embert.engine.errors import BrokenModel
from embert.engine.heads.checkpoints.stored import stored_in
from embert.engine.heads.checkpoints.vocabulary import Vocabulary
from embert.engine.heads.description import Layer, MultiVector, Role, TokenWeights

__all__ = ["CONVERT", "read_multi_vector", "read_token_weights", "still_pickled"]

SPARSE, MULTI = "sparse_linear", "colbert_linear"  # the files' names without their endings

# Tokens without a weight, by their kinds, and XLM-RoBERTa's names for them.
SPECIAL_TOKENS = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

# Python to run in the model's folder. It reads the pickles without running code of theirs.
CONVERT = (
    "import torch; from safetensors.torch import save_file; "
    "[save_file(torch.load(f'{{name}}.pt', map_location='cpu', weights_only=True), f'{{name}}.safetensors') "
    "for name in {names}]"
)


def read_token_weights(folder: Path, transformer: Path, hidden_size: int) -> TokenWeights | None:
    """The sparse head, where `folder` has one. The tokenizer is in `transformer`. Raises BrokenModel."""
    layer = _layer(folder, SPARSE, hidden_size)
    if layer is None:
        return None
    if layer.outputs != 1:
        raise BrokenModel(f"{folder / layer.file}: weight has {layer.outputs} rows, expected 1")
    vocabulary = Vocabulary(transformer)
    return TokenWeights(
        layer, vocabulary.ids(vocabulary.special(kind) or token for kind, token in SPECIAL_TOKENS.items())
    )


def read_multi_vector(folder: Path, hidden_size: int, prompt: str) -> MultiVector | None:
    """The multi-vector head, where `folder` has one. `prompt` goes before every text. Raises BrokenModel."""
    layer = _layer(folder, MULTI, hidden_size)
    if layer is None:
        return None
    return MultiVector((layer,), skips_first=True, query=Role(prompt), document=Role(prompt))


def still_pickled(folder: Path) -> list[str]:
    """The heads that `folder` has only as pickles: names of files without their endings."""
    return [
        name
        for name in (SPARSE, MULTI)
        if (folder / f"{name}.pt").is_file() and not (folder / f"{name}.safetensors").is_file()
    ]


def _layer(folder: Path, name: str, hidden_size: int) -> Layer | None:
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        return None
    stored = stored_in(path)
    outputs = stored.shapes.get("weight", (0,))[0]
    stored.check("weight", (outputs, hidden_size))
    if "bias" in stored.shapes:
        stored.check("bias", (outputs,))
    return Layer("", path.name, hidden_size, outputs, "bias" in stored.shapes, "identity")
