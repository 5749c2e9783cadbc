"""The tables of models in README.md and docs/models.md.

What a model_type computes, and which heads it has, comes from its reader (engine/models/), given the config.json of it
in the tests. Names of checkpoints and what was tested stand here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from embert.engine.models import MODEL_TYPES, read_config
from embert.engine.models.encoder_config import EncoderConfig
from tests.oracles.jina_bert_v2 import CONFIG as JINA_BERT_V2
from tests.oracles.model_cases import CHECKPOINTS, MODEL_CASES, hugging_face
from tests.oracles.nomic_bert import CONFIG as NOMIC_BERT
from tests.oracles.nomic_bert import EXPERTS

MISTRAL3 = {"model_type": "mistral3", "text_config": {"model_type": "ministral3", "is_causal": False}}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tables."""

    name: str
    model_types: tuple[str, ...]  # in config.json
    checkpoints: str
    config: str | dict[str, Any] = ""  # a row of the tests' models, or a config.json; empty: the first of model_types

    @property
    def devices(self) -> str:
        """Devices that it is tested on; tests/csrc/test_models_on_gpu.py has every checkpoint of CHECKPOINTS."""
        needed = {self.config_read().model_type, *self.model_types} - {"new"}  # GTE's older code
        return "CPU, GPU" if needed <= {name.partition(",")[0] for name in CHECKPOINTS} else "CPU"

    def config_read(self) -> EncoderConfig:
        """EncoderConfig of an example config.json."""
        fields = self.config
        if isinstance(fields, str):
            prefix, stated = MODEL_CASES[fields or self.model_types[0]]
            fields = hugging_face(f"{prefix}Config")(**stated).to_dict()
        with TemporaryDirectory() as folder:
            path = Path(folder, "config.json")
            path.write_text(json.dumps(fields))
            return read_config(path)


ROWS = (
    Row("BERT", ("bert",), "all-MiniLM, BGE, E5, gte-base"),
    Row("XLM-RoBERTa", ("xlm-roberta",), "multilingual-e5, BGE-M3, bge-reranker-v2-m3"),
    Row("DistilBERT", ("distilbert",), "multi-qa-distilbert"),
    Row("MPNet", ("mpnet",), "all-mpnet-base-v2"),
    Row("RoBERTa, CamemBERT", ("roberta", "camembert"), "all-distilroberta-v1"),
    Row("ModernBERT", ("modernbert",), "gte-modernbert-base, granite-embedding-english-r2"),
    Row("nomic-bert", ("nomic_bert",), "nomic-embed-text-v1.5"),
    Row("nomic-bert with experts", ("nomic_bert",), "nomic-embed-text-v2-moe", {**NOMIC_BERT, **EXPERTS}),
    Row("GTE", ("gte", "new"), "gte-multilingual-base, gte-large-en-v1.5"),
    Row("JinaBERT v2", ("bert",), "jina-embeddings-v2-base-en", JINA_BERT_V2),
    Row("jina-embeddings-v3", ("jina_embeddings_v3",), "jina-embeddings-v3"),
    Row("jina-embeddings-v5-text", ("jina_embeddings_v5",), "jina-embeddings-v5-text-small, -nano"),
    Row("ELECTRA", ("electra",), "ms-marco-electra-base"),
    Row("ALBERT", ("albert",), "paraphrase-albert-small-v2"),
    Row("DeBERTa v2, v3", ("deberta-v2",), "mxbai-rerank-base-v1, deberta-v3-base-zeroshot"),
    Row("EuroBERT", ("eurobert",), "EuroBERT-210m"),
    Row("UltraBERT", ("ultrabert",), "UltraBERT-150M, -380M, -Embed"),
    Row("Qwen3", ("qwen3",), "Qwen3-Embedding, voyage-4-nano"),
    Row("pplx-embed", ("bidirectional_pplx_qwen3",), "pplx-embed-v1-0.6b"),
    Row("Gemma", ("gemma",), "bge-reranker-v2-gemma"),
    Row("Gemma 3", ("gemma3_text",), "embeddinggemma-300m"),
    Row("Ministral 3", ("ministral3",), "Nemotron-3-Embed-1B, -8B"),
    Row("Mistral 3, its text part", ("mistral3",), "Nemotron-3.5-Rerank-8B", MISTRAL3),
    Row("EmbeddingGemma 2, its text part", ("embedding_gemma2",), "embeddinggemma-2"),
    Row("LFM2", ("lfm2",), "LFM2-ColBERT-350M, LFM2.5-Embedding-350M"),
    Row("Qwen2, Mistral, LLaMA", ("qwen2", "mistral", "llama"), "gte-Qwen2, e5-mistral-7b-instruct"),
)

STATIC = "static embeddings", "potion-base-8M and others of Model2Vec, static-retrieval-mrl-en-v1"


def positions(encoder_config: EncoderConfig) -> str:
    """The kind of position encoding."""
    attention = [encoder_config.attention_of(layer) for layer in range(encoder_config.layers)]
    traits = {
        "table": encoder_config.position_table,
        "distances": encoder_config.relative_buckets > 0,
        "disentangled": encoder_config.disentangled is not None,
        "ALiBi": encoder_config.alibi,
        "rotary": any(each.rotary for each in attention),
        "windows": any(each.window for each in attention),
    }
    return ", ".join(name for name, holds in traits.items() if holds)


def layers(encoder_config: EncoderConfig) -> str:
    """Differences of its layers from BERT's."""
    traits = {
        "convolutions": any(each.convolution for each in encoder_config.attention),
        "inputs of layers": encoder_config.layer_inputs > 0,
        "gated": encoder_config.gated,
        "experts": encoder_config.experts is not None,
        "norms first": encoder_config.pre_norm,
        "narrow embeddings": encoder_config.embedding_size is not None,
        "shared weights": bool(encoder_config.shared_layers),
        "grouped heads": encoder_config.kv_heads != encoder_config.heads,
        "causal": encoder_config.causal,
    }
    return ", ".join(name for name, holds in traits.items() if holds) or "as BERT's"


def checked_rows() -> tuple[Row, ...]:
    """Return ROWS; ValueError if a model type has none."""
    if missing := set(MODEL_TYPES) - {each for row in ROWS for each in row.model_types}:
        raise ValueError(f"ROWS has no row for {', '.join(sorted(missing))}")
    return ROWS


def readme() -> Iterable[tuple[str, ...]]:
    yield "model", "for example", "tested on"
    for row in checked_rows():
        yield row.name, row.checkpoints, row.devices
    yield *STATIC, "CPU"


def models() -> Iterable[tuple[str, ...]]:
    """The table of docs/models.md."""
    yield "model", "`model_type`", "for example", "positions", "layers", "scores, classes", "SPLADE", "tested on"
    for row in checked_rows():
        encoder_config = row.config_read()
        heads = (encoder_config.tensors.classification, encoder_config.tensors.masked_lm)
        yield (
            row.name, ", ".join(f"`{each}`" for each in row.model_types), row.checkpoints, positions(encoder_config),
            layers(encoder_config), *("no" if head is None else "yes" for head in heads), row.devices,
        )  # fmt: skip
    yield STATIC[0], "–", STATIC[1], "none", "none", "no", "no", "CPU"  # noqa: RUF001


def replaced(page: str, table: Callable[[], Iterable[tuple[str, ...]]]) -> str:
    """Replace the table of models in the page's text by `readme` or `models`."""
    header, *rows = table()
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    pattern = re.compile(r"^\| model \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)
    return pattern.sub(lambda _: "\n".join(lines) + "\n", page, count=1)
