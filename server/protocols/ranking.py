"""Shared by the routes that rerank, score or classify: pairs of texts to logits, to scores, to rows of JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ConfigDict

from embert.engine import Encoded, Task
from embert.engine.heads.description import Classifier
from embert.engine.heads.scores import scores
from embert.engine.options import check_pair_instruction
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import EmptyInput
from embert.server.protocols.request_context import RequestContext
from embert.server.protocols.serialization import join
from embert.server.registry.tokenizing import TextPairs
from embert.server.request.request_body import FAIL_FAST, InputForm, RequestBody

Floats = npt.NDArray[np.float32]

_BYTES_AT_ONCE = 1 << 17  # of JSON, written before the event loop runs other requests: about 1 ms


class Document(RequestBody):
    """A document as an object. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    text: str


Documents = Annotated[list[str | Document], FAIL_FAST]
DOCUMENTS = InputForm("a list of strings, or of objects with a string `text`", shortest=0)


def documents_texts(documents: Sequence[str | Document]) -> list[str]:
    return [document if isinstance(document, str) else document.text for document in documents]


# --- pairs to scores ---


@dataclass(frozen=True, slots=True)
class Ranking:
    """Texts by their scores, best first; ties keep the order of the request."""

    indices: list[int]
    scores: list[bytes]  # JSON
    tokens: int  # of all pairs


def activation(classifier: Classifier | None, *, raw: bool) -> str:
    """Returns the function that turns logits into scores. One label has a sigmoid, whatever the model's files say.

    None is late interaction, whose scores are sums of cosines.
    """
    if raw or classifier is None:
        return "identity"
    return "sigmoid" if len(classifier.labels) == 1 else classifier.activation


async def score_pairs(
    context: RequestContext,
    firsts: list[str],
    seconds: list[str],
    *,
    options: TokenizeOptions,
) -> tuple[Floats, Encoded]:
    """The logits of pairs by a model of one label, or MaxSim by a model of late interaction: float32 [n].

    Raises EmptyInput, PayloadTooLarge for too many, and what tokenizing and inference raise.
    """
    handle = context.handle
    for texts, param in zip((firsts, seconds), (options.param, options.second_param), strict=True):
        if not texts:
            raise EmptyInput("must not be an empty list", param)
        handle.limits.check_documents(len(texts), param)
    instruction = options.instruction
    if instruction is not None:
        check_pair_instruction(handle.model, instruction)
        context.hold(2 * len(instruction) * len(seconds), "the pairs with their instruction")
    if handle.scorer is None:
        encoded = await context.tokenize_roles(TextPairs(firsts, seconds), options)
    else:
        encoded = await context.tokenize_pairs(TextPairs(firsts, seconds, instruction or ""), options)
    result = await context.run(encoded, Task.CLASSIFY, queries=len(firsts) if handle.scorer is None else 0)
    return result.vectors[:, 0], encoded


async def rank(
    context: RequestContext,
    query: str,
    texts: list[str],
    *,
    top_n: int | None,
    raw: bool,
    options: TokenizeOptions,
) -> Ranking:
    """Texts by their relevance to a query; `top_n` keeps the best, where it is neither None nor 0.

    The errors are those of `score_pairs`.
    """
    logits, encoded = await score_pairs(context, [query], texts, options=options)
    # Scores of logits far from 0 may be equal, so logits decide.
    order = np.argsort(-logits, kind="stable")[: top_n or None]
    best = scores(logits[order][:, None], activation(context.handle.scorer, raw=raw))[:, 0]
    return Ranking(order.tolist(), json_numbers(best), encoded.tokens)


# --- JSON ---


def json_numbers(values: Floats) -> list[bytes]:
    """Each of float32 [n], with no more digits than it needs; n may be 0."""
    text = orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    return text.split(b",") if text else []


async def join_rows(rows: Iterable[bytes]) -> bytes:
    """The rows with commas between them; the event loop runs other requests between many or long ones."""
    pieces: list[bytes] = []
    size, is_large = 0, False
    for row in rows:
        pieces.append(row)
        size += len(row) + 256  # cost of a short row
        if size > _BYTES_AT_ONCE:
            size, is_large = 0, True
            await asyncio.sleep(0)
    return await join(pieces, b",") if is_large else b",".join(pieces)
