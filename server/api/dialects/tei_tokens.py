"""text-embeddings-inference's routes of the tokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import orjson
from pydantic import BaseModel, RootModel

from embert.engine.tokenization.encoded import TokenInfo
from embert.engine.tokenization.turns import Turns
from embert.server.api.input.request_body import IDS, IdList, IdLists, InputForm, InputForms, RequestBody, TextList
from embert.server.api.input.texts_and_ids import GivenTexts
from embert.server.api.request_context import JSON, RequestContext
from embert.server.http.errors import EmptyInput

__all__ = ["DecodeRequest", "Texts", "TokenizeRequest", "Tokens", "decode", "tokenize"]


class TokenizeRequest(RequestBody):
    """`POST /tokenize`."""

    input_forms: ClassVar[InputForms] = {"inputs": InputForm("a string or a list of strings", shortest=0)}

    inputs: str | TextList
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Token(BaseModel):
    """One token, and where it stands in the text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens(RootModel[list[list[Token]]]):
    """Tokens a text."""


async def tokenize(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /tokenize`."""
    service = context.service
    request = await context.parse(TokenizeRequest)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not texts:
        raise EmptyInput("`inputs` must not be an empty list", "inputs")
    service.limits.check_count(len(texts), "inputs")
    service.check_open()
    prompt = service.served.prompt(request.prompt_name) if request.prompt_name is not None else ""
    turns = service.tokenizer.tokenize_turns(
        texts,
        add_special_tokens=request.add_special_tokens,
        prompt=prompt,
        most_unbroken=service.config.max_unbroken_characters,
    )
    characters = context.breakdown.characters = sum(map(len, texts))
    began = time.perf_counter()
    check = service.checking(context.options, partial(service.limits.check_answer, param="inputs", more=True))
    context.breakdown.tokens, body = await service.tokenizer_pool.run(
        _written(turns, len(texts)), characters, context.receive, check
    )
    context.breakdown.tokenize_s = time.perf_counter() - began
    service.limits.check_answer(context.breakdown.tokens, "inputs")
    return JSON, body


def _written(turns: Iterator[list[tuple[int, list[TokenInfo]]]], texts: int) -> Turns[tuple[int, bytes]]:
    """Write tokens as JSON, turn by turn; returns their number and the JSON."""
    rows: list[list[bytes]] = [[] for _ in range(texts)]
    count = 0
    for turn in turns:
        for index, tokens in turn:
            count += len(tokens)
            if tokens:
                rows[index].append(orjson.dumps(tokens)[1:-1])
        yield count
    return count, b"[%b]" % b",".join(b"[%b]" % b",".join(row) for row in rows)


class DecodeRequest(RequestBody):
    """`POST /decode`."""

    input_forms: ClassVar[InputForms] = {"ids": IDS}

    ids: IdList | IdLists
    skip_special_tokens: bool = True


class Texts(RootModel[list[str]]):
    """A text a list of ids."""


async def decode(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /decode`."""
    service = context.service
    request = await context.parse(DecodeRequest)
    sequences = GivenTexts.of(request.ids, "ids").items
    service.limits.check_count(len(sequences), "ids")
    service.check_open()
    tokens = sum(map(len, sequences))
    service.limits.check_answer(tokens, "ids")
    turns = service.tokenizer.decode_turns(sequences, skip_special_tokens=request.skip_special_tokens)
    began = time.perf_counter()
    check = service.checking(context.options, lambda _: None)
    texts = await service.tokenizer_pool.run(turns, tokens, context.receive, check)
    context.breakdown.tokenize_s = time.perf_counter() - began
    return JSON, orjson.dumps(texts)
