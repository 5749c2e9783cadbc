"""The routes of the tokenizer: text-embeddings-inference's, and vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import orjson
from pydantic import BaseModel, Field, RootModel

from embert.engine.tokenization.encoded import Chunks, TokenInfo
from embert.server.config.options import MAX_RESPONSE_TOKENS
from embert.server.http.errors import EmptyInput, Invalid
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.registry.tokenizing import InputTexts
from embert.server.request.request_body import IDS, IdList, IdLists, InputForm, InputForms, RequestBody, TextList

ResultT = TypeVar("ResultT")
TokenChunk = list[tuple[int, list[TokenInfo]]]

_TOKEN_BYTES = 72  # of a token in a JSON response
_WORD_BYTES = 16  # of a token as text


class TokenizeRequest(RequestBody):
    """`POST /tokenize`."""

    known = FIELDS["tokenize"]
    input_forms: ClassVar[InputForms] = {"inputs": InputForm("a string or a list of strings", shortest=0)}

    inputs: str | TextList | None = Field(None, description="A text, or texts.")
    prompt: str | None = Field(None, description="A text. The response is vLLM's. Ignored if there are `inputs`.")
    model: str | None = Field(None, description="The served model's name or id, with `prompt`.")
    add_special_tokens: bool = Field(True, description="Add the special tokens that the model reads.")
    return_token_strs: bool | None = Field(None, description="With `prompt`: return the tokens as text, too.")
    prompt_name: str | None = Field(None, description="One of the model's prompts, put before each text.")


class Token(BaseModel):
    """One token, and its position in the text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokensOfPrompt(BaseModel):
    """vLLM's response to a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Tokens(RootModel[list[list[Token]] | TokensOfPrompt]):
    """Tokens of each text, or vLLM's response."""


async def tokenize(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(TokenizeRequest)
    if request.inputs is None:
        if request.prompt is None:
            raise Invalid("is required, or `prompt` in its place; the request has neither", "inputs")
        return await _tokenize_prompt(context, request, request.prompt)
    handle = context.choose(None)  # TEI's routes do not read `model`
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not texts:
        raise EmptyInput("must not be an empty list", "inputs")
    handle.limits.check_count(len(texts), "inputs")
    handle.check_open()
    return JSON, await _run(context, request, texts, "inputs", partial(_write_tokens, len(texts)))


async def _tokenize_prompt(context: RequestContext, request: TokenizeRequest, prompt: str) -> tuple[bytes, bytes]:
    handle = context.choose(request.model)
    handle.check_open()
    tokens = await _run(context, request, [prompt], "prompt", _list_tokens)
    ids = [token.id for token in tokens]
    metadata = {
        "count": len(ids),
        "max_model_len": handle.model.max_input_length,
        "tokens": ids,
        "token_strs": handle.tokenizer.words(ids) if request.return_token_strs else None,
    }
    return JSON, orjson.dumps(metadata)


async def _run(
    context: RequestContext,
    request: TokenizeRequest,
    texts: list[str],
    param: str,
    collect: Callable[[Iterator[TokenChunk]], Chunks[tuple[int, ResultT]]],
) -> ResultT:
    """The tokens of texts in the field `param`, as `collect` returns them."""
    handle = context.handle
    prompt = ""
    if request.prompt_name is not None:
        prompt, _ = handle.resolve_options(prompt_name=request.prompt_name)
    chunks = handle.tokenizer.tokenize_chunks(texts, add_special_tokens=request.add_special_tokens, prompt=prompt)
    characters = context.breakdown.characters = sum(map(len, texts))
    most = min(characters + (len(prompt) + 2) * len(texts), MAX_RESPONSE_TOKENS)
    context.hold(most * _TOKEN_BYTES, "the response")
    began = time.perf_counter()
    check = partial(
        handle.check_progress, context.options, partial(handle.limits.check_response_tokens, param=param, more=True)
    )
    context.breakdown.tokens, result = await handle.tokenizer_pool.run(
        collect(chunks), characters, context.receive, check
    )
    context.breakdown.tokenize_s = time.perf_counter() - began
    handle.limits.check_response_tokens(context.breakdown.tokens, param)
    return result


def _list_tokens(chunks: Iterator[TokenChunk]) -> Chunks[tuple[int, list[TokenInfo]]]:
    """The tokens of one text, and their number."""
    tokens: list[TokenInfo] = []
    for chunk in chunks:
        for _, more in chunk:
            tokens += more
        yield len(tokens)
    return len(tokens), tokens


def _write_tokens(texts: int, chunks: Iterator[TokenChunk]) -> Chunks[tuple[int, bytes]]:
    """Write tokens as JSON, chunk by chunk; returns their number and the JSON."""
    rows: list[list[bytes]] = [[] for _ in range(texts)]
    count = 0
    for chunk in chunks:
        for index, tokens in chunk:
            count += len(tokens)
            if tokens:
                rows[index].append(orjson.dumps(tokens)[1:-1])
        yield count
    return count, b"[%b]" % b",".join(b"[%b]" % b",".join(row) for row in rows)


class DecodeRequest(RequestBody):
    """`POST /decode`."""

    known = FIELDS["decode"]
    input_forms: ClassVar[InputForms] = {"ids": IDS}

    ids: IdList | IdLists
    skip_special_tokens: bool = True


class Texts(RootModel[list[str]]):
    """A text a list of ids."""


async def decode(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(DecodeRequest)
    sequences = InputTexts.of(request.ids, "ids").items
    return JSON, orjson.dumps(await _decode(context, sequences, "ids", skips=request.skip_special_tokens))


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    known = FIELDS["detokenize"]
    input_forms: ClassVar[InputForms] = {"tokens": InputForm("a list of token ids")}

    tokens: IdList = Field(description="The token ids of one text; special ones stay in the response.")
    model: str | None = Field(None, description="The served model's name or id.")


class Detokenized(BaseModel):
    """vLLM's response of `/detokenize`."""

    prompt: str


async def detokenize(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(DetokenizeRequest)
    context.choose(request.model)
    if not request.tokens:
        raise EmptyInput("must not be an empty list", "tokens")
    (text,) = await _decode(context, [request.tokens], "tokens", skips=False)
    return JSON, orjson.dumps({"prompt": text})


async def _decode(context: RequestContext, sequences: Sequence[list[int]], param: str, *, skips: bool) -> list[str]:
    """The texts of token ids in the field `param`; `skips`: without special tokens."""
    handle = context.handle
    handle.limits.check_count(len(sequences), param)
    handle.check_open()
    tokens = sum(map(len, sequences))
    handle.limits.check_response_tokens(tokens, param)
    context.hold(tokens * _WORD_BYTES, "the response")
    chunks = handle.tokenizer.decode_chunks(sequences, skip_special_tokens=skips)
    began = time.perf_counter()
    check = partial(handle.check_progress, context.options, lambda _: None)
    texts = await handle.tokenizer_pool.run(chunks, tokens, context.receive, check)
    context.breakdown.tokenize_s = time.perf_counter() - began
    return texts
