"""Heads on the CUDA encoder next to the encoder alone and next to sentence-transformers, FP16, on one GPU.

    python -m benchmarks.encoder.heads [--rows rerank splade m3 entities decisions] [--rounds 7]

    rerank   XLM-R-large's shape (bge-reranker-v2-m3): one query of 12 tokens with 100 passages of 150
    splade   BERT-base with its masked language model's head: 256 passages, mean 104 tokens
    m3       bge-m3's shape: dense, sparse and multi-vectors of 256 passages, of one forward
    entities BERT-base with nine classes of tokens: 256 passages
    decisions ModernBERT-large's shape with Laya's two layers after it: 80 questions of 200 tokens, five options each

"alone" is the same encoder with its pooling head. Both are timed from token ids, numpy in and numpy out, two batches in
flight, in a process each. The rivals are sentence-transformers' CrossEncoder and SparseEncoder and transformers'
BertForTokenClassification, or torch's layers after ModernBERT, in FP16 with sdpa, from token ids too, in padded batches
of 32 sorted by length. Weights are random. Rounds alternate between all of them; times are medians of bursts; "one
text" is the time of the first text with nothing else in flight.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from benchmarks.encoder.cuda_process import CudaProcess
from benchmarks.encoder.gpu_timing import device_burst
from benchmarks.encoder.gpu_workloads import lengths_of, random_batch
from benchmarks.lib import record
from benchmarks.lib.random_model import XLMR_LARGE, make_laya, of_shape
from benchmarks.rivals.padded_transformers import padded_batches
from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.heads.description import MarkerDecider
from embert.engine.tasks import Task

PAIR_TOKENS = 12 + 150 + 4
POSITIVE_WEIGHTS = 200  # of a sparse vector, about as many as a trained SPLADE gives


@dataclass(frozen=True)
class Row:
    """One model: its folder, the folder of its encoder alone, a batch, the tasks wanted and the rival's call."""

    name: str
    folder: Path
    alone: Path
    batch: PackedBatch
    tasks: Task
    rival: Callable[[], object] | None
    pooling: str | None = None  # None: the model's own


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.heads", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    figures = []
    for name in options.rows:
        with tempfile.TemporaryDirectory() as scratch:
            figures.append(measured(ROWS[name](Path(scratch)), options.rounds))
        gc.collect()
        torch.cuda.empty_cache()
    head = [
        "row",
        "tokens",
        "with the head, ms",
        "alone, ms",
        "ratio",
        "rival, ms",
        "rival ÷ ours",
        "extra MB",
        "one text, ms",
    ]
    record.print_table(head, [_cells(figure) for figure in figures])
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "rows": figures}
    print(f"\nwritten: {record.write('heads', facts)}")


def measured(row: Row, rounds: int) -> dict[str, Any]:
    """Time one row: milliseconds of each, interleaved."""
    ours, alone = CudaProcess(row.folder, row.pooling), CudaProcess(row.alone, "cls")
    batch = row.batch.with_tasks(row.tasks)
    times: dict[str, list[float]] = {"ours": [], "alone": [], "rival": []}
    for _ in range(rounds):
        times["ours"].append(ours.ask("burst", batch))
        times["alone"].append(alone.ask("burst", row.batch))
        if row.rival is not None:
            with torch.inference_mode():
                times["rival"].append(device_burst(row.rival))
    one_text = ours.ask("alone", batch.take(np.array([0])))[0]
    extra = ours.started[1][2] - alone.started[1][2]
    ours.close()
    alone.close()
    ms = {name: statistics.median(values) if values else None for name, values in times.items()}
    return {"row": row.name, "tokens": row.batch.tokens, "ms": ms, "extra_mb": extra / 1e6, "one_text_ms": one_text}


def _cells(figure: dict[str, Any]) -> list[str]:
    ms = figure["ms"]
    rival = ["–", "–"] if ms["rival"] is None else [f"{ms['rival']:.2f}", f"{ms['rival'] / ms['ours']:.2f}"]  # noqa: RUF001
    return [
        figure["row"],
        f"{figure['tokens']:,}",
        f"{ms['ours']:.3f}",
        f"{ms['alone']:.3f}",
        f"{ms['ours'] / ms['alone']:.3f}",
        *rival,
        f"{figure['extra_mb']:.0f}",
        f"{figure['one_text_ms']:.3f}",
    ]


def _rerank(scratch: Path) -> Row:
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**XLMR_LARGE)
    config.num_labels = 1
    with torch.device("cuda"):
        model: Any = transformers.XLMRobertaForSequenceClassification(config)
    model = model.half().eval()
    folder, alone = _saved(model, scratch / "head"), _saved(model.roberta, scratch / "alone")
    batch = random_batch(np.full(100, PAIR_TOKENS))
    padded = padded_batches(batch, 32)

    def rival() -> list[torch.Tensor]:
        return [torch.sigmoid(model(input_ids=ids, attention_mask=mask).logits) for ids, mask in padded]

    return Row("rerank", folder, alone, batch, Task.CLASSIFY, rival)


def _splade(scratch: Path) -> Row:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = transformers.BertForMaskedLM(transformers.BertConfig())
    model = model.half().eval()
    batch = random_batch(lengths_of("passage"))
    padded = padded_batches(batch, 32)

    def rival() -> list[torch.Tensor]:
        rows = []
        for ids, mask in padded:
            logits = model(input_ids=ids, attention_mask=mask).logits
            rows.append(torch.log1p(torch.relu(logits * mask[..., None])).amax(1))
        return rows

    with torch.inference_mode():
        # A bias that leaves about as many weights positive as a trained model does.
        values = model(input_ids=padded[0][0], attention_mask=padded[0][1]).logits.amax(1).float()
        threshold = values.kthvalue(values.shape[1] - POSITIVE_WEIGHTS, 1).values.mean()
        model.cls.predictions.bias -= threshold.half()
    folder, alone = _saved(model, scratch / "head"), _saved(model.bert, scratch / "alone")
    modules = [("", "Transformer"), ("1_SpladePooling", "SpladePooling")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    listed[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_SpladePooling").mkdir()
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": 30522}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))
    return Row("splade", folder, alone, batch, Task.SPARSE, rival)


def _m3(scratch: Path) -> Row:
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**XLMR_LARGE)
    with torch.device("cuda"):
        model: Any = transformers.XLMRobertaModel(config, add_pooling_layer=False)
    model = model.half()
    folder, alone = _saved(model, scratch / "head"), _saved(model, scratch / "alone")
    random = np.random.default_rng(0)
    for name, outputs in (("sparse_linear", 1), ("colbert_linear", 1024)):
        weight = random.normal(0, 0.03, (outputs, 1024)).astype(np.float32)
        save_file({"weight": weight, "bias": np.zeros(outputs, np.float32)}, folder / f"{name}.safetensors")
    batch = random_batch(lengths_of("passage"))
    return Row("m3", folder, alone, batch, Task.EMBED | Task.SPARSE | Task.MULTI, None, "cls")


def _entities(scratch: Path) -> Row:
    torch.manual_seed(0)
    config = transformers.BertConfig(id2label=dict.fromkeys(range(9), ""))
    with torch.device("cuda"):
        model: Any = transformers.BertForTokenClassification(config)
    model = model.half().eval()
    folder, alone = _saved(model, scratch / "head"), _saved(model.bert, scratch / "alone")
    batch = random_batch(lengths_of("passage"))
    padded = padded_batches(batch, 32)

    def rival() -> list[torch.Tensor]:
        return [model(input_ids=ids, attention_mask=mask).logits for ids, mask in padded]

    return Row("entities", folder, alone, batch, Task.TOKEN_CLASSES, rival)


def _decisions(scratch: Path) -> Row:
    encoder = of_shape("modernbert-large").half().cuda().eval()
    head = make_laya(scratch / "head", engine.load_model().folder, encoder)
    folder, alone = scratch / "head", _saved(encoder, scratch / "alone")
    marked, batch = engine.load_model(str(folder)).heads.decider, random_batch(np.full(80, 200))
    assert isinstance(marked, MarkerDecider)
    batch.ids.reshape(80, 200)[:, 20:60:8] = marked.marker
    batch = dataclasses.replace(batch, token_types=np.zeros_like(batch.ids))
    padded = padded_batches(batch, 32)

    def rival() -> list[torch.Tensor]:
        rows = []
        for ids, mask in padded:
            hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state + head.type_emb.weight[0]
            rows.append(head.scorer(head.head(hidden)[ids == marked.marker]))
        return rows

    return Row("decisions", folder, alone, batch, Task.DECIDE, rival)


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    # A model folder must have a tokenizer; only its special tokens are read here.
    special = {"model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(special))
    return folder


ROWS: dict[str, Callable[[Path], Row]] = {
    "rerank": _rerank, "splade": _splade, "m3": _m3, "entities": _entities, "decisions": _decisions,
}  # fmt: skip

if __name__ == "__main__":
    main()
