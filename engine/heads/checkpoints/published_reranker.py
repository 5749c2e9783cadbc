"""Prompts and score tokens of rerankers that are published as language models, without modules.json.

Only the name and the README.md of such a folder differ from those of a model that generates text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel
from embert.engine.files.chat_template import PairText
from embert.engine.files.json_files import architectures_of
from embert.engine.heads.checkpoints.stored import Vocabulary
from embert.engine.heads.modules import LogitScore

CARD_CHARACTERS = 1 << 14  # of README.md: what stands before its first heading

QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
)
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_TASK = (
    "\nYou are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary relevance "
    "judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
)
BGE_TASK = (
    "\nGiven a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)


@dataclass(frozen=True, slots=True)
class Format:
    """The prompt of a family of rerankers, and the tokens whose logits make a score: the first less the second."""

    name: str  # a part of the names of its repositories, in small letters
    architecture: str  # of config.json
    pair_text: PairText
    true: str
    false: str | None = None


FORMATS = (
    Format(
        "qwen3-reranker",
        "Qwen3ForCausalLM",
        PairText(
            f"{QWEN3}{QWEN3_INSTRUCTION}\n<Query>: ",
            "\n<Document>: ",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            instructed=(QWEN3, "\n<Query>: "),
        ),
        "yes",
        "no",
    ),
    Format(
        "mxbai-rerank-",
        "Qwen2ForCausalLM",
        PairText(f"{MXBAI}query: ", "\ndocument: ", MXBAI_TASK, instructed=(f"{MXBAI}instruction: ", "\nquery: ")),
        "1",
        "0",
    ),
    Format("bge-reranker-v2-gemma", "GemmaForCausalLM", PairText("<bos>A: ", "\nB: ", BGE_TASK), "Yes"),
)


def published_format(model_id: str, folder: Path, fields: Mapping[str, Any]) -> Format | None:
    """Returns the format of the model in `folder`, by its name and README.md, or None if FORMATS does not have it.

    `fields` are those of its config.json.
    """
    candidates = [each for each in FORMATS if each.architecture in architectures_of(fields)]
    if not candidates:
        return None
    names = "\n".join(_names(model_id, folder)).lower()
    return next((each for each in candidates if each.name in names), None)


def _names(model_id: str, folder: Path) -> Iterator[str]:
    """The last part of the model's id, the folder's name, or the hub's name of it, and the head of README.md."""
    yield model_id.rstrip("/").rpartition("/")[2]
    yield folder.name
    if folder.parent.name == "snapshots":  # of the hub's cache
        yield folder.parent.parent.name
    card = folder / "README.md"
    if card.is_file():
        with card.open(encoding="utf-8", errors="replace") as file:
            before, _, rest = file.read(CARD_CHARACTERS).partition("\n# ")
        yield f"{before}\n{rest.partition(chr(10))[0]}"


def score_tokens(found: Format, transformer: Path) -> LogitScore:
    """The ids of a format's tokens in the tokenizer of the folder `transformer`. Raises BrokenModel."""
    vocabulary = Vocabulary(transformer)
    ids = [None if token is None else vocabulary.id(token) for token in (found.true, found.false)]
    if ids[0] is None or (found.false is not None and ids[1] is None):
        raise BrokenModel(f"{vocabulary.path} has no token {found.true!r} or {found.false!r}, of which scores are made")
    return LogitScore(ids[0], ids[1])
