"""Numerical errors of the CUDA encoder and of transformers in FP16, both against transformers in float64.

    python -m benchmarks.encoder.exactness [--models base large narrow modernbert minilm=FOLDER]
        [--stored float32 float16] [--sequences 200] [--longest 512]
    python -m benchmarks.encoder.exactness --lengths 1 16 128 512 2048 --models BERT MPNet --stored float32 float16
    python -m benchmarks.encoder.exactness --lengths 1 16 128 512 2048 --models Qwen3 LLaMA --stored float32 bfloat16
        --dtypes float16 bfloat16

An error is the Frobenius norm of the difference over that of the reference, of all raw mean-pooled vectors together.
Everyone has the same weights, as the model is stored: in FP32 or in 16 bits. A model given as name=FOLDER reads English
passages. The others have random weights, with norms that are not identities, and read random ids, 1 to --longest a
text. "apart" is embert without LayerNorms folded into the matrix products. Where embert chooses BF16 because FP16 does
not hold the model, transformers computes in BF16 too.

With --lengths, models are of MODEL_TYPES, and errors are those of texts of each length: of raw mean-pooled vectors, and
of the last token's. What is rounded alike for every token, such as a weight, does not average out in long texts.
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
from embert.engine.errors import UnsupportedModel

MAX_TOKENS = 16384
TEXTS = 32  # of each of --lengths, or as many as MAX_TOKENS allow
Vectors = npt.NDArray[np.float64]

WIDE: dict[str, Any] = {
    "vocab_size": 30_528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 2050,
}
DECODER: dict[str, Any] = {**WIDE, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048}
# BERT-base's size of every model type whose class transformers has: the class, and its config.
MODEL_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", WIDE),
    "XLM-RoBERTa": ("XLMRoberta", {**WIDE, "type_vocab_size": 1}),
    "DistilBERT": ("DistilBert", {"vocab_size": 30_528, "max_position_embeddings": 2050}),
    "MPNet": ("MPNet", WIDE),
    "ELECTRA": ("Electra", {**WIDE, "embedding_size": 768}),
    "ALBERT": ("Albert", WIDE),
    "DeBERTa v3": ("DebertaV2", {**random_model.SHAPES["deberta-v3-base"][1], "max_position_embeddings": 2050}),
    "ModernBERT": ("ModernBert", {**WIDE, "intermediate_size": 1152, "pad_token_id": 0}),
    "nomic-bert": ("NomicBert", WIDE),
    "GTE": ("Gte", WIDE),
    "EuroBERT": ("EuroBert", {**DECODER, "pad_token_id": 0}),
    "Qwen3": ("Qwen3", DECODER),
    "Qwen2": ("Qwen2", DECODER),
    "Mistral": ("Mistral", {**DECODER, "sliding_window": 256}),
    "LLaMA": ("Llama", DECODER),
    "Gemma 3": ("Gemma3Text", {**DECODER, "query_pre_attn_scalar": 64, "sliding_window": 256}),
}


def main(argv: Sequence[str] | None = None) -> None:
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
    parser.add_argument("--lengths", nargs="+", type=int, help="of texts of random ids, each measured by itself")
    parser.add_argument("--dtypes", nargs="+", default=["auto"], help="to compute in, with --lengths")
    parser.add_argument("--name", default="exactness", help="of the record")
    options = parser.parse_args(argv)
    if options.lengths:
        by_length(options)
        return
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


def by_length(options: argparse.Namespace) -> None:
    """Measure texts of each length, and write the record after every model."""
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(0)
    lengths = [length for length in options.lengths for _ in range(min(TEXTS, MAX_TOKENS // length))]
    batch = [random.integers(1000, 30000, length).astype(np.int32) for length in lengths]
    for model in options.models:
        for stored in options.stored:
            with tempfile.TemporaryDirectory() as scratch:
                folder = stored_model(model, stored, Path(scratch))
                exact = of_transformers(folder, batch, torch.float64)
                for asked in options.dtypes:
                    row: dict[str, Any] = {"model": model, "stored": stored}
                    try:
                        ours = {pooling: of_embert(folder, batch, pooling, asked) for pooling in exact}
                    except UnsupportedModel as refusal:
                        print(f"{model} in {asked}: {refusal}", flush=True)
                        continue
                    row["dtype"] = ours["mean"][1]
                    theirs = of_transformers(folder, batch, getattr(torch, row["dtype"]))
                    for pooling, wanted in exact.items():
                        both = {"embert": ours[pooling][0], "transformers": theirs[pooling]}
                        row[pooling] = {
                            name: [error(vectors[at], wanted[at]) for at in np.equal.outer(options.lengths, lengths)]
                            for name, vectors in both.items()
                        }
                    rows.append(row)
                    print(row, flush=True)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        path = record.write(options.name, {**versions, "lengths": options.lengths, "rows": rows})
    record.print_table(
        ["model", "stored", "type", *map(str, options.lengths)],
        [[row["model"], row["stored"], row["dtype"], *ratios(row)] for row in rows],
    )
    print(f"\nwritten: {path}")


def ratios(row: dict[str, Any]) -> list[str]:
    """Return the error of embert over that of transformers for each length: of means, and of last tokens."""
    quotients = [np.divide(row[pooling]["embert"], row[pooling]["transformers"]) for pooling in ("mean", "last-token")]
    return [f"{mean:.2f}, {last:.2f}" for mean, last in zip(*quotients, strict=True)]


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
        elif name in MODEL_TYPES:
            prefix, config = MODEL_TYPES[name]
            network = getattr(transformers, f"{prefix}Model")(getattr(transformers, f"{prefix}Config")(**config))
        else:
            network = transformers.BertModel(transformers.BertConfig(**SHAPES[name]), add_pooling_layer=False)
        for norm in (module for module in network.modules() if type(module).__name__.endswith("Norm")):
            if getattr(norm, "weight", None) is None:
                continue
            drawn = torch.empty_like(norm.weight.data).uniform_(0.5, 1.5)
            norm.weight.data = drawn - 1 if type(norm).__name__ == "Gemma3RMSNorm" else norm.weight.data * drawn
            if getattr(norm, "bias", None) is not None:
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
    exact = of_transformers(folder, batch, torch.float64)["mean"]
    ours, dtype = of_embert(folder, batch)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(exact, axis=1)
    return {
        "dtype": dtype,
        "embert": error(ours, exact),
        "apart": error(of_embert(folder, batch, fold=False)[0], exact),
        "transformers": error(of_transformers(folder, batch, getattr(torch, dtype))["mean"], exact),
        "worst_cosine": float(((ours * exact).sum(axis=1) / lengths).min()),
    }


def error(vectors: Vectors, exact: Vectors) -> float:
    """Return the relative error of vectors."""
    return float(np.linalg.norm(vectors - exact) / np.linalg.norm(exact))


def of_embert(
    folder: Path, batch: list[npt.NDArray[np.int32]], pooling: str = "mean", dtype: str = "auto", *, fold: bool = True
) -> tuple[Vectors, str]:
    """Return embert's raw vectors, float64 [n, width], in batches of as many texts as fit, and its type."""
    model = engine.load_model(str(folder), pooling=pooling)
    ours = CudaEncoder(model, dtype=dtype, max_batch_tokens=MAX_TOKENS, fold=fold, graphs=False)
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


def of_transformers(folder: Path, batch: list[npt.NDArray[np.int32]], dtype: torch.dtype) -> dict[str, Vectors]:
    """Return those of transformers on the GPU by pooling, one text at a time, so without padding."""
    model = of_folder(folder, dtype).cuda().eval()
    means, lasts = [], []
    with torch.inference_mode():
        for each in batch:
            rows = model(input_ids=torch.tensor(each[None], device="cuda").long()).last_hidden_state[0].double()
            means.append(rows.mean(dim=0))
            lasts.append(rows[-1])
    return {"mean": torch.stack(means).cpu().numpy(), "last-token": torch.stack(lasts).cpu().numpy()}


def of_folder(folder: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model. A pooler that the folder lacks is random, and nothing here reads it."""
    return transformers.AutoModel.from_pretrained(folder, dtype=dtype)


if __name__ == "__main__":
    main()
