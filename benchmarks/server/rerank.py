"""A reranker over HTTP next to its encoder alone and next to sentence-transformers: XLM-R-large's shape, on a GPU.

    python -m benchmarks.server.rerank [--connections 8] [--window 6] [--passage-tokens 150]

A request has one query and 100 passages. The server's rate is that of clients that send one request after the other.
The encoder alone runs texts of query and passage, as long as the pairs, from token ids: full batches, two in flight,
with its pooling head. The rival is CrossEncoder.predict in FP16 with its default batches, one request after the other.
Weights are random, the tokenizer is the packaged model's. All take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import CrossEncoder

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, post
from benchmarks.lib.random_model import XLMR_LARGE
from benchmarks.lib.running_server import embert
from benchmarks.lib.texts import QUERY_TOKENS, Lengths, texts
from benchmarks.server.encoder_baseline import measure
from embert.engine import Tokenizer, load_model

DOCUMENTS = 100
REQUESTS = 16  # different ones


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.server.rerank", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--window", type=float, default=6.0, help="seconds that one round measures")
    parser.add_argument("--passage-tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _model(Path(scratch))
        rates = _measured(folder, options)
    pairs_per_s, alone, rival = (statistics.median(rates[name]) for name in ("http", "alone", "rival"))
    row = [f"{each:,.0f}" for each in (pairs_per_s, alone, rival)]
    row += [f"{pairs_per_s / alone:.3f}, ≥ 0.90", f"{pairs_per_s / rival:.2f}, ≥ 2.5"]
    head = ["pairs/s over HTTP", "encoder alone", "CrossEncoder", "of the encoder, target", "times the rival, target"]
    record.print_table(head, [row])
    figures = {**vars(options), "rounds": rates, "pairs_per_s": pairs_per_s, "alone": alone, "rival": rival}
    print(f"\nwritten: {record.write('rerank', figures)}")


def _measured(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    tokenizer = Tokenizer(load_model(str(folder)))
    length = options.passage_tokens
    passages = texts(Lengths(mean=length, low=length, high=length), REQUESTS * DOCUMENTS, folder / "tokenizer.json")
    queries = texts(QUERY_TOKENS, REQUESTS, folder / "tokenizer.json", seed=1)
    requests, joined, pairs = [], [], []
    for index, query in enumerate(queries):
        documents = [each.text for each in passages[index * DOCUMENTS : (index + 1) * DOCUMENTS]]
        encoded = tokenizer.encode_pairs([query.text], documents)
        body = {"query": query.text, "documents": documents}
        requests.append(post("/v1/rerank", body, kind="rerank", texts=DOCUMENTS, tokens=encoded.tokens))
        joined += [f"{query.text} {document}" for document in documents]
        pairs.append([(query.text, document) for document in documents])
    rates: dict[str, list[float]] = {"http": [], "alone": [], "rival": []}
    rival = CrossEncoder(str(folder), device="cuda", model_kwargs={"dtype": torch.float16})
    rival.predict(pairs[0])
    for _ in range(options.rounds):
        started = time.perf_counter()
        for each in pairs:
            rival.predict(each)
        rates["rival"].append(len(pairs) * DOCUMENTS / (time.perf_counter() - started))
        baseline = measure(folder / "alone", "cuda", {"pairs": joined}, joined[:1], options.window / 2)
        rates["alone"].append(baseline.texts_per_s["pairs"])
        with LoadGenerator() as load, embert("--workers", "1", model=str(folder)) as server:
            plan = Plan(server.port, tuple(requests), connections=options.connections, window_s=options.window)
            responses = load.run(plan)
            if (responses.status != 200).any():
                raise SystemExit(f"requests failed, with status {set(responses.status.tolist())}")
            inside = (responses.ended >= responses.opened) & (responses.ended < responses.opened + options.window)
            rates["http"].append(float(inside.sum()) * DOCUMENTS / options.window)
    return rates


def _model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**XLMR_LARGE)
    config.num_labels = 1
    with torch.device("cuda"):
        model: Any = transformers.XLMRobertaForSequenceClassification(config)
    model = model.half()
    model.save_pretrained(folder)
    model.roberta.save_pretrained(folder / "alone")
    tokenizer = load_model(None).transformer_folder
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config["model_input_names"] = ["input_ids", "attention_mask"]  # XLM-R has no token types
    for each in (folder, folder / "alone"):
        shutil.copy(tokenizer / "tokenizer.json", each)
        (each / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()
