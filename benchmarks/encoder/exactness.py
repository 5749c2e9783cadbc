"""Numerical errors of the CUDA encoder and of transformers in FP16, both against transformers in float64.

    python -m benchmarks.encoder.exactness [--models base large narrow modernbert minilm=FOLDER]
        [--stored float32 float16] [--sequences 200] [--longest 512]

An error is the Frobenius norm of the difference over that of the reference, of all raw mean-pooled vectors together.
Everyone has the same weights, as the model is stored: in FP32 or in 16 bits. A model given as name=FOLDER reads English
passages. The others have random weights, with norms that are not identities, and read random ids, 1 to --longest a
text. "apart" is embert without LayerNorms folded into the matrix products. Where embert chooses BF16 because FP16 does
not hold the model, transformers computes in BF16 too.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer

from benchmarks.encoder.gpu_workloads import SHAPES
from benchmarks.lib import random_model, record
from benchmarks.lib.texts import PASSAGE_TOKENS, texts
from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder

MAX_TOKENS = 16384
Vectors = npt.NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.exactness", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--models",
        nargs="+",
        default=["base", "large", "narrow"],
        help="base, large, narrow, a name of benchmarks.lib.random_model.SHAPES, or name=FOLDER",
    )
    parser.add_argument(
        "--stored", nargs="+", choices=("float32", "float16", "bfloat16"), default=["float32", "float16"]
    )
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest text of random ids")
    parser.add_argument("--name", default="exactness", help="of the record")
    options = parser.parse_args(argv)
    rows = []
    for model in options.models:
        for stored in options.stored:
            with tempfile.TemporaryDirectory() as scratch:
                folder = stored_model(model, stored, Path(scratch))
                name, _, source = model.partition("=")
                random = np.random.default_rng(0)
                longest = min(options.longest, engine.load_model(str(folder), pooling="mean").max_input_length)
                batch = passages(folder, options.sequences) if source else ids(random, options.sequences, longest)
                rows.append({"model": name, "stored": stored, **errors(folder, batch)})
    figures = {"torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    path = record.write(options.name, figures)
    record.print_table(
        ["model", "stored", "type", "embert", "apart", "transformers", "embert / transformers", "worst cosine"],
        [
            [
                row["model"],
                row["stored"],
                row["dtype"],
                *(f"{row[who]:.2e}" for who in ("embert", "apart", "transformers")),
                f"{row['embert'] / row['transformers']:.2f}",
                f"{row['worst_cosine']:.7f}",
            ]
            for row in rows
        ],
    )
    print(f"\nwritten: {path}")


def stored_model(model: str, stored: str, scratch: Path) -> Path:
    """Write the model into `scratch` with its weights in the type `stored`: those of name=FOLDER, or random ones."""
    dtype = getattr(torch, stored)
    name, _, source = model.partition("=")
    if source:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        network: Any = of_folder(Path(source), torch.float32)
    else:
        (scratch / "tokenizer.json").write_text("{}")
        torch.manual_seed(0)
        if name in random_model.SHAPES:
            network = random_model.of_shape(name)
        else:
            network = transformers.BertModel(transformers.BertConfig(**SHAPES[name]), add_pooling_layer=False)
        for norm in (module for module in network.modules() if isinstance(module, torch.nn.LayerNorm)):
            norm.weight.data.uniform_(0.5, 1.5)
            if norm.bias is not None:
                norm.bias.data.normal_(0.0, 0.1)
    network.to(dtype).save_pretrained(scratch)
    return scratch


def ids(random: np.random.Generator, sequences: int, longest: int) -> list[npt.NDArray[np.int32]]:
    """Return random ids, 1 to `longest` a text."""
    lengths = random.integers(1, longest + 1, sequences)
    return [random.integers(1000, 30000, length).astype(np.int32) for length in lengths]


def passages(folder: Path, sequences: int) -> list[npt.NDArray[np.int32]]:
    """Return the ids of English passages."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    drawn = texts(PASSAGE_TOKENS, sequences, folder / "tokenizer.json")
    return [np.array(tokenizer.encode(each.text).ids, np.int32) for each in drawn]


def errors(folder: Path, batch: list[npt.NDArray[np.int32]]) -> dict[str, Any]:
    """Return the relative error of each, embert's worst cosine, and the type that it chose."""
    exact = of_transformers(folder, batch, torch.float64)
    ours, dtype = of_embert(folder, batch, fold=True)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(exact, axis=1)

    def error(vectors: Vectors) -> float:
        return float(np.linalg.norm(vectors - exact) / np.linalg.norm(exact))

    return {
        "dtype": dtype,
        "embert": error(ours),
        "apart": error(of_embert(folder, batch, fold=False)[0]),
        "transformers": error(of_transformers(folder, batch, getattr(torch, dtype))),
        "worst_cosine": float(((ours * exact).sum(axis=1) / lengths).min()),
    }


def of_embert(folder: Path, batch: list[npt.NDArray[np.int32]], *, fold: bool) -> tuple[Vectors, str]:
    """Return embert's raw vectors, float64 [n, width], in batches of as many texts as fit, and its type."""
    model = engine.load_model(str(folder), pooling="mean")
    ours = CudaEncoder(model, max_batch_tokens=MAX_TOKENS, fold=fold, graphs=False)
    vectors, some = [], batch[:1]
    for each in [*batch[1:], None]:
        if each is not None and sum(map(len, some)) + len(each) <= MAX_TOKENS:
            some.append(each)
            continue
        cu_seqlens = np.concatenate([[0], np.cumsum([len(each) for each in some])]).astype(np.int32)
        raw = np.zeros(len(some), np.bool_)
        vectors.append(ours.encode(PackedBatch(np.concatenate(some), cu_seqlens, normalize=raw)))
        some = [] if each is None else [each]
    ours.close()
    return np.concatenate(vectors).astype(np.float64), ours.dtype


def of_transformers(folder: Path, batch: list[npt.NDArray[np.int32]], dtype: torch.dtype) -> Vectors:
    """Return those of transformers on the GPU, one text at a time, so without padding."""
    model = of_folder(folder, dtype).cuda().eval()
    with torch.inference_mode():
        vectors = [
            model(input_ids=torch.tensor(each[None], device="cuda").long()).last_hidden_state[0].double().mean(dim=0)
            for each in batch
        ]
    return torch.stack(vectors).cpu().numpy()


def of_folder(folder: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model. A pooler that the folder lacks is random, and nothing here reads it."""
    return transformers.AutoModel.from_pretrained(folder, dtype=dtype)


if __name__ == "__main__":
    main()
