"""Decisions and reranking over HTTP, with shared prefixes and without: Qwen3-0.6B's and Laya's shapes.

    python -m benchmarks.server.decisions [--device cpu --layers 2 --connections 2 --window 30]

Clients send one request after the other: 20 questions about a state, 100 documents after a query, and over one
connection, one question to each of two models. Servers with and without sharing take turns and get the same requests;
without it, the encoder is that of `unshared`. Weights are random. Qwen's tokenizer is a byte-level BPE with its words,
Laya's that of the default model. CPU is the engine process's. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.random_model import make_laya, of_shape
from benchmarks.lib.running_server import embert
from benchmarks.lib.texts import Lengths, english, texts
from benchmarks.server.measurement import Round, median, run_round
from embert.engine import Question, Tokenizer, load_encoder, load_model
from embert.engine.decisions import second_texts
from embert.engine.encoders.base import Encoder
from embert.engine.files.tokenizer_config import QWEN_PATTERN
from embert.engine.model import Model
from embert.engine.tasks import NO_SHARING

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
REQUESTS = 8  # different ones of each workload
QUESTION_TOKENS = 5  # of instructions: options and template add about 43
DECISIONS = {  # the model, questions, and tokens of the state
    "20 questions about a state": ("decide", 20, 860),
    "one question": ("decide", 1, 160),
    "one question to Laya": ("laya", 1, 160),
}


def unshared(model: Model, **options: Any) -> Encoder:
    """The usual encoder, without shared prefixes. Loaded by `--encoder`."""
    encoder = load_encoder(model, **options)
    encoder.sharing = NO_SHARING
    return encoder


ENCODERS = {"shared": "auto", "unshared": "benchmarks.server.decisions:unshared"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.server.decisions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="HTTP processes; 0: the default of the server")
    parser.add_argument("--window", type=float, default=6.0, help="seconds that a workload is measured in one round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    measured: dict[tuple[str, str], list[Round]] = {}
    with tempfile.TemporaryDirectory() as scratch, LoadGenerator() as load:
        folders = {name: Path(scratch, name) for name in ("decide", "rerank", "laya")}
        _write(folders["decide"], options.layers, "ForCausalLM")
        _write(folders["rerank"], options.layers, "ForSequenceClassification", num_labels=1, pad_token_id=0)
        make_laya(folders["laya"], load_model().folder, of_shape("modernbert-large", options.layers))
        workloads = {
            name: (options.connections if questions > 1 else 1, _decisions(folders[model], name, questions, tokens))
            for name, (model, questions, tokens) in DECISIONS.items()
        }
        workloads["100 documents after a query"] = (options.connections, _rerankings(folders["rerank"]))
        served = [*(f"{name}={folder}" for name, folder in folders.items()), "--device", options.device]
        served += ["--workers", str(options.workers), "--max-queue-seconds", "0", "--request-timeout", "600"]
        for _ in range(options.rounds):
            for way, encoder in ENCODERS.items():
                with embert(*served, "--encoder", encoder) as server:
                    for name, (connections, requests) in workloads.items():
                        plan = Plan(server.port, requests, connections, options.window, settle_s=options.window / 2)
                        measured.setdefault((name, way), []).append(run_round(load, server, plan))
    medians = {key: median(rounds) for key, rounds in measured.items()}
    if failed := sum(each.failed for each in medians.values()):
        raise SystemExit(f"{failed} requests failed")
    rows = []
    for (name, way), each in medians.items():
        ratio = each.texts_per_s / max(medians[name, "unshared"].texts_per_s, 1e-9)
        figures = (each.texts_per_s, each.p50_ms[name], each.cpu_us["engine"] / 1e3)
        tokens = workloads[name][1][0].tokens
        rows.append([name, way, f"{tokens:,}", *(f"{value:,.1f}" for value in figures), f"{ratio:.2f}"])
    head = ["workload", "prefixes", "tokens a request", "texts/s", "p50 ms", "CPU ms a request", "ratio"]
    record.print_table(head, rows)
    records = [
        {"workload": name, "prefixes": way, "tokens": workloads[name][1][0].tokens, **asdict(each)}
        for (name, way), each in medians.items()
    ]
    print(f"\nwritten: {record.write('decisions', {**vars(options), 'rows': records})}")


def _decisions(folder: Path, kind: str, questions: int, state_tokens: int) -> tuple[Request, ...]:
    model = load_model(str(folder))
    tokenizer, requests = Tokenizer(model), []
    states = _texts(folder, state_tokens, REQUESTS)
    asked = _texts(folder, QUESTION_TOKENS, REQUESTS * questions)
    for index, state in enumerate(states):
        own = asked[index * questions : (index + 1) * questions]
        pairs = tokenizer.encode_pairs([state], second_texts(model, [*map(Question.predicate, own)]))
        listed = [{"type": "predicate", "name": f"q{number}", "instructions": text} for number, text in enumerate(own)]
        body = {"model": folder.name, "input": state, "questions": listed}
        requests.append(post("/v1/decisions", body, kind=kind, texts=questions, tokens=pairs.tokens))
    return tuple(requests)


def _rerankings(folder: Path) -> tuple[Request, ...]:
    tokenizer, requests = Tokenizer(load_model(str(folder))), []
    documents = _texts(folder, 90, 100 * REQUESTS)
    for index, query in enumerate(_texts(folder, 60, REQUESTS)):
        own = documents[index * 100 : (index + 1) * 100]
        tokens = tokenizer.encode_pairs([query], own).tokens
        body = {"model": "rerank", "query": query, "documents": own}
        requests.append(post("/v1/rerank", body, kind="100 documents after a query", texts=100, tokens=tokens))
    return tuple(requests)


def _texts(folder: Path, tokens: int, count: int) -> list[str]:
    path = load_model(str(folder)).transformer_folder / "tokenizer.json"
    drawn = texts(Lengths(mean=tokens, low=tokens, high=tokens), count, path, seed=tokens)
    return [each.text for each in drawn]


def _write(folder: Path, layers: int, head: str, **fields: Any) -> None:
    """Write a model and its tokenizer, of words of the manual that comes with Python."""
    of_shape("qwen3-0.6b", layers, head, **fields).save_pretrained(folder)
    library = Library(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(english(1500), trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 2048, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
