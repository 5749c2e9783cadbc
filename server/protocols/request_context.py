"""One request: its options, its body, and the steps that the handlers of all protocols share."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope

from embert.engine import Encoded, Task, TaskOutput
from embert.engine.batch import cumulative
from embert.engine.encode_batches import gather
from embert.engine.heads.late_interaction import multi_vector_mask, pool_texts
from embert.engine.options import check_instruction_tokens
from embert.engine.tokenization.encoded import EncodedSpans, TokenizeOptions, concatenate
from embert.server.config import option_name
from embert.server.engine_client.router import EncodeResult
from embert.server.http.errors import Invalid, PayloadTooLarge, RequestError, TooManyWeights, describe_name
from embert.server.http.held_bytes import SMALL_BYTES
from embert.server.http.request_head import PLAIN_KEY, prefers, read_request_options
from embert.server.http.response import Body
from embert.server.observability.request_record import RequestRecord
from embert.server.protocols.serialization import raw_rows
from embert.server.registry.model_handle import BYTES_A_WEIGHT, Capability, ModelHandle
from embert.server.registry.model_registry import ModelSelector
from embert.server.registry.tokenizing import InputTexts, TextPairs
from embert.server.request.known_fields import TranslatedFields, header_value
from embert.server.request.large_bodies import LARGE, SplitIds, check_values, memory_of, split_ids
from embert.server.request.request_body import RequestBody, TextsAndIds, parse, validate
from embert.server.request.turns import LARGE_BODY, LARGE_RESPONSE

RequestT = TypeVar("RequestT", bound=RequestBody)
EncodedT = TypeVar("EncodedT", Encoded, EncodedSpans)

JSON, OCTETS = b"application/json", b"application/octet-stream"
_A_ROW_A_TOKEN = Task.TOKENS | Task.MULTI
_AS_WRITTEN: Mapping[str, str] = {}  # names of fields, where the client has the schema's own
_QUICK_TOKENS = 128  # requests with up to this many tokens are tokenized before the queue is checked


@dataclass(slots=True)
class _Shared:
    """The shared limits of one request's parts, and the counts so far."""

    token_vectors: int = 0
    weights: int = 0
    ignored: dict[str, None] | None = None  # names of fields that no API has


class RequestContext:
    """A request and its model, for the handlers.

    `handle` is the model. If a body may name it, `choose` sets it.
    """

    __slots__ = (
        "_body", "_is_query", "_param", "_record", "_says_model", "_selector", "_shared", "_size", "breakdown",
        "handle", "headers", "names", "options", "receive", "scope", "trace", "truncated",
    )  # fmt: skip

    def __init__(self, selector: ModelSelector, scope: Scope, receive: Receive | None, record: RequestRecord) -> None:
        """`receive` None: the body comes by `take_body`, and the request is cancelled when its client leaves.

        Raises Invalid for request options that cannot be read."""
        self._selector, self.scope, self.receive, self._record = selector, scope, receive, record
        self.trace = record.trace
        self.breakdown = LatencyBreakdown()
        config = selector.registry.config
        headers = () if PLAIN_KEY in scope else scope["headers"]
        self.options = read_request_options(headers, time.monotonic(), config.request_timeout)
        self._set_model(selector.default)
        self._says_model = selector.is_open  # the response names its model
        self._body: bytes | dict[str, Any] = b""  # the body, or one request of several in it
        self._size = 0  # of the body, in bytes
        self._param = ""  # field with the texts
        self._is_query = False  # the texts are queries, for a model of late interaction
        self._shared = _Shared()
        self.names: Mapping[str, str] = _AS_WRITTEN  # of fields of the schema → as the client wrote them
        self.headers: list[tuple[bytes, bytes]] = []  # of the response
        self.truncated = 0  # texts that were cut

    def part(self, body: dict[str, Any], parts: int) -> RequestContext:
        """The context of one of several requests in this body. Its response is JSON."""
        part = RequestContext(self._selector, {**self.scope, "headers": []}, self.receive, self._record)
        part.options, part._body, part._size = self.options, body, self._size // parts
        part._shared = self._shared
        return part

    async def read_body(self) -> None:
        """Raises ServerError for a body that is too large, too slow or compressed."""
        assert self.receive is not None  # noqa: S101 - see __init__
        headers = self.scope["headers"]
        _check_encoding(headers)
        options = self.options
        body = await self._selector.registry.bodies.read(headers, self.receive, options.deadline, options.set_by)
        self._body, self._size = body, len(body)
        self._record.held = len(body)

    def hold(self, size: int, purpose: str) -> None:
        """Reserves `size` bytes until the response is sent. `purpose` appears in the error; see HeldBytes.check."""
        held = self._selector.registry.held
        held.check(size, purpose, self._param or None)
        held.requests += size
        self._record.held += size

    def take_body(self, body: bytes) -> None:
        """Takes a body that came with its head. Raises what `read_body` raises."""
        if PLAIN_KEY not in self.scope:
            _check_encoding(self.scope["headers"])
        size = len(body)
        registry = self._selector.registry
        registry.bodies.check(size)
        self._body, self._size = body, size
        registry.held.requests += size
        self._record.held = size

    def begin_of(self, field: str) -> bytes:
        """Returns the first byte of the field's JSON value, or b"". For a choice of schema, before `parse`."""
        if isinstance(self._body, dict):
            value = self._body.get(field)
            begins = ((dict, b"{"), (list, b"["), (str, b'"'))
            return next((begin for kind, begin in begins if isinstance(value, kind)), b"")
        match = re.search(rb'"%b"\s*+:\s*+(.)' % field.encode(), self._body, re.DOTALL)
        return b"" if match is None else match[1]

    def has_field(self, field: str) -> bool:
        """True if the body or an object in it has the field; before `parse`.

        Inside of a text a name has backslashes before its quotes, and no colon follows a text that is the name.
        """
        if isinstance(self._body, dict):
            objects = (self._body, *(value for value in self._body.values() if isinstance(value, dict)))
            return any(field in each for each in objects)
        name = b'"%b"' % field.encode()
        return name in self._body and re.search(rb"%b\s*+:" % name, self._body) is not None

    async def parse(self, schema: type[RequestT]) -> RequestT:
        """The request in the body, once; the body is dropped.

        The model is not known before, so a body may be as large as any model takes.
        """
        body, self._body = self._body, b""
        turns = self._selector.registry.turns
        if self._size <= LARGE:
            if self._size > LARGE_BODY:
                await turns.wait()
            else:
                turns.short_requests += 1
            note = self._note_fields
            return parse(schema, body, None, note) if isinstance(body, bytes) else validate(schema, body, note)
        registry = self._selector.registry
        split: list[SplitIds | None] = []
        request: list[RequestT] = []
        steps: tuple[Callable[[], object], ...]
        if isinstance(body, dict):
            steps = (lambda: request.append(validate(schema, body, self._note_fields)),)
        else:
            steps = (
                lambda: check_values(
                    body,
                    registry.most(schema.text_limit),
                    registry.most_ids,
                    option=option_name(schema.text_limit),
                    strings_per_text=schema.strings_per_text,
                ),
                lambda: split.append(split_ids(body)),
                lambda: request.append(parse(schema, body, split[0], self._note_fields)),
            )
        check_time = self.handle.admission.check_time
        memory: list[int] = []
        steps += (lambda: memory.append(memory_of(request[0])),)
        await turns.run(steps, lambda: check_time(self.options))
        if memory[0] > self._size:
            self.hold(memory[0] - self._size, "the texts of the request body")
        return request[0]

    def _note_fields(self, fields: TranslatedFields) -> None:
        self.names = fields.names
        if fields.ignored:
            self._shared.ignored = (self._shared.ignored or {}) | dict.fromkeys(fields.ignored)
            self._selector.registry.metrics.ignored_fields.inc(len(fields.ignored))

    def choose(
        self, *names: str | None, capability: Capability | None = None, priority: int | None = None
    ) -> ModelHandle:
        """Routes the request to the model that all given names refer to; see ModelSelector.find.

        The response names its model, unless the request has exactly this name. A `priority` above 0 is low.
        """
        handle = self._selector.find(names, capability)
        if handle is not self.handle:
            self._set_model(handle)
        if priority is not None and priority > 0:
            self.options.low_priority = True
        self._record.model, self._record.priority = handle.name, self.options.priority
        nonempty = [name for name in names if name]
        if nonempty:
            self._says_model = not all(map(handle.is_named, nonempty))
        return handle

    def is_model(self, name: str) -> bool:
        """True if a model of the server has this name or id, even if it has failed."""
        registry = self._selector.registry
        return name in registry.by_name or name in registry.broken

    @property
    def path_model(self) -> str | None:
        """The name of a model below `/models/` in the path."""
        return self._selector.path_model

    @property
    def deployment(self) -> str | None:
        """The name of a model as a deployment in Azure's path. Raises ModelUnknown for an empty one."""
        name: str | None = self.scope.get("path_params", {}).get("name")
        if name == "":
            raise self._selector.registry.unknown(name, None, "the deployment in the path")
        return name

    def _set_model(self, handle: ModelHandle) -> None:
        self.handle = handle
        if not self.options.has_priority:
            self.options.low_priority = handle.low_priority

    async def tokenize(
        self,
        inputs: TextsAndIds,
        options: TokenizeOptions,
        *,
        task: str | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
    ) -> Encoded:
        """Texts or ids, checked, to packed ids. `task` names one of the model's adapters, `prompt_name` a prompt.

        `instruction` takes the place of the one in the model's prompt of queries.

        Raises InputError or a ServerError for what is wrong with them, and Overloaded, before tokenizing, where the
        queue cannot take as many tokens as there are words.
        """
        handle, param, is_query = self.handle, options.param, options.is_query
        self._is_query = bool(is_query)
        texts = self._read_texts(inputs, param)
        for name, value in (("prompt_name", prompt_name), ("instruction", instruction)):
            if texts.kind is not str and value is not None:
                raise Invalid("cannot be used with token ids, which are taken as they are", name)
        prompt, adapter = handle.resolve_options(task, prompt_name, is_query, instruction)
        if instruction is not None:
            texts = await self._add_instruction(texts, instruction, prompt, options)
        least = None
        if texts.most_tokens > _QUICK_TOKENS:
            least = partial(texts.least_tokens, handle.model.max_input_length)
        encode, check = handle.input_tokenizer.encode, handle.limits.check_tokens
        encoded = await self._encode(encode, texts, least, check, param, options, prompt)
        return encoded if adapter < 0 else dataclasses.replace(encoded, adapter=adapter)

    async def _add_instruction(
        self, texts: InputTexts, instruction: str, prompt: str, options: TokenizeOptions
    ) -> InputTexts:
        """The texts, with the size that they have behind the prompt, whose tokens are counted once.

        Raises InputError for an instruction that leaves no token.
        """
        handle, param = self.handle, "instruction"
        characters = len(prompt) * len(texts.items)
        self.hold(2 * characters, "the texts with their instruction")
        limit = min(options.limit or handle.model.max_input_length, handle.model.max_input_length)
        alone = TokenizeOptions(truncate=True, limit=limit, param=param)
        check = partial(
            handle.check_progress, self.options, partial(handle.limits.check_tokens, param=param, more=True)
        )
        counted = await handle.input_tokenizer.encode(InputTexts.of([prompt], param), self.receive, check, alone, "")
        check_instruction_tokens(instruction, counted, limit)
        return dataclasses.replace(texts, characters=texts.characters + characters)

    async def tokenize_spans(
        self, inputs: str | list[str], options: TokenizeOptions, *, stride: int | None
    ) -> EncodedSpans:
        """Texts to packed ids with the characters of each token, without prompts; see Tokenizer.encode_spans.

        Bounds and errors are those of `tokenize`; also PayloadTooLarge for more scores than a response may have.
        """
        handle, param = self.handle, options.param
        texts, least = self._read_texts(inputs, param), None
        if texts.most_tokens > _QUICK_TOKENS:
            least = partial(texts.least_tokens, handle.model.max_input_length if stride is None else texts.characters)

        def check(tokens: int, param: str, *, more: bool = False) -> None:
            handle.limits.check_tokens(tokens, param, more=more)
            handle.limits.check_weights(tokens * handle.token_labels, param)

        return await self._encode(handle.input_tokenizer.encode_spans, texts, least, check, param, options, stride)

    async def tokenize_pairs(self, texts: TextPairs, options: TokenizeOptions) -> Encoded:
        """Pairs of texts, which the caller has counted, to packed ids. Bounds and errors are those of `tokenize`.

        The default prompt precedes first texts.
        """
        handle = self.handle
        self.breakdown.characters = texts.characters
        shares = handle.engine is not None and handle.engine.sharing.tasks > 0
        least = partial(texts.least_tokens, handle.model.max_input_length, options, shares=shares)

        def encode(pairs: TextPairs, *arguments: Any) -> Awaitable[Encoded]:
            prompt = handle.default_prompt
            pairs = pairs.with_prompt(prompt) if prompt else pairs  # once the queue has room for it
            return handle.input_tokenizer.encode_pairs(pairs, *arguments)

        return await self._encode(encode, texts, least, handle.limits.check_pair_tokens, options.second_param, options)

    async def tokenize_roles(self, texts: TextPairs, options: TokenizeOptions) -> Encoded:
        """Queries and documents of late interaction, which the caller has counted, to packed ids.

        Each query stands before its documents. Bounds and errors are those of `tokenize`, for each text.
        """
        handle, documents = self.handle, cast("list[str]", texts.seconds)
        cuts = handle.config.auto_truncate if options.truncate is None else options.truncate
        self.breakdown.characters = sum(map(len, texts.firsts)) + sum(map(len, documents))
        parts = []
        for items, param, own_limit, limit_param in (
            (texts.firsts, options.param, options.first_limit, "max_tokens_per_query"),
            (documents, options.second_param, options.second_limit, "max_tokens_per_doc"),
        ):
            is_query = items is texts.firsts
            limits = {"truncate_prompt_tokens": options.limit, limit_param: own_limit} if cuts else {}
            for name, limit in limits.items():
                handle.check_limit(limit, is_query=is_query, param=name)
            limit = min((limit for limit in limits.values() if limit is not None), default=None)
            role = dataclasses.replace(options, limit=limit, is_query=is_query, param=param)
            prompt, _ = handle.resolve_options(is_query=is_query)
            inputs = InputTexts(items, str, sum(map(len, items)), 0)
            parts.append((inputs, role, prompt))

        async def encode(_: object, receive: Receive | None, check: Callable[[int], None]) -> Encoded:
            both = [
                await handle.input_tokenizer.encode(inputs, receive, check, role, prompt)
                for inputs, role, prompt in parts
            ]
            return concatenate(both)

        all_texts = InputTexts([*texts.firsts, *documents], str, self.breakdown.characters, 0)
        least = partial(all_texts.least_tokens, handle.model.max_input_length)
        check = handle.limits.check_pair_tokens
        encoded: Encoded = await self._encode(encode, all_texts, least, check, options.second_param)
        queries, count = len(texts.firsts), encoded.sequences
        order = np.arange(count) if queries == 1 else np.arange(count).reshape(2, queries).T.reshape(-1)
        return gather(encoded, order, cumulative(encoded.lengths))

    def _read_texts(self, inputs: TextsAndIds, param: str) -> InputTexts:
        self._param = param
        texts = InputTexts.of(inputs, param)
        self.handle.limits.check_count(len(texts.items), param)
        self.breakdown.characters = texts.characters
        return texts

    async def _encode(
        self,
        encode: Callable[..., Awaitable[EncodedT]],
        texts: InputTexts | TextPairs,
        least: Callable[[], int] | None,
        check: Callable[..., None],
        param: str,
        *arguments: Any,
    ) -> EncodedT:
        """Tokenizes with a method of InputTokenizer, and counts the tokens.

        `least` counts the tokens that there are at least; None if there are few. `check` refuses too many in `param`.
        """
        handle, request, breakdown = self.handle, self.options, self.breakdown
        if self._size > LARGE_BODY and request.low_priority:
            await self._selector.registry.low_priority_turns.take()
        began = time.perf_counter()
        if least is not None:
            handle.admission.check_capacity(least, texts.most_tokens, request)
        progress = partial(handle.check_progress, request, partial(check, param=param, more=True))
        result = await encode(texts, self.receive, progress, *arguments)
        ended = time.perf_counter()
        encoded: Encoded = result.encoded if result.__class__ is EncodedSpans else result  # type: ignore[assignment]
        sequences, tokens = encoded.sequences, encoded.tokens
        breakdown.tokenize_s, breakdown.tokens = ended - began, tokens
        check(tokens, param)
        work = handle.metrics.work(handle.name, request.priority)
        work.texts += sequences
        work.tokens += tokens
        work.truncated_texts += encoded.truncated
        work.request_texts.observe(sequences)
        work.text_tokens.observe_many(encoded.lengths.tolist())
        self.truncated += encoded.truncated
        if self.trace is not None:
            self.trace.tokenized(ended, breakdown.tokenize_s, sequences, tokens)
        return result

    async def run(
        self,
        encoded: Encoded,
        tasks: Task = Task.EMBED,
        *,
        dimensions: int = 0,
        normalize: bool = True,
        queries: int = 0,
    ) -> EncodeResult:
        """The rows of the tasks for what `tokenize` gave, through an engine; see Router.encode.

        Of multi-vectors they are those that a query or a document has, not one a token. Raises PayloadTooLarge for more
        tokens than may have a row each, and for more weights of sparse vectors than a response may have.
        """
        handle = self.handle
        # The operators of flags cost ten times as much.
        only_one_each = tasks == Task.EMBED or tasks == Task.CLASSIFY or tasks >= Task.DECIDE
        size = 0 if queries else handle.response_bytes(encoded, tasks, dimensions)
        if size > SMALL_BYTES and self.wants_raw:
            size //= 2
        self.hold(size, "the response")
        if tasks == Task.CLASSIFY and handle.labels > 1:
            self._count_weights(encoded.sequences * handle.labels)
        if not only_one_each:
            self._check_rows(encoded, tasks)
        try:
            result = await handle.router.encode(
                encoded,
                self.receive,
                self.options,
                model=handle.number,
                tasks=tasks,
                dimensions=dimensions,
                normalize=normalize,
                queries=queries,
                note_failure=self.breakdown.note_failure,
                trace=self.trace,
            )
        except TooManyWeights as error:
            self._count_weights(error.weights)
            raise
        self.breakdown.note(result)
        if size > LARGE_RESPONSE:
            if self.options.low_priority:
                await self._selector.registry.low_priority_turns.take()
            await self._selector.registry.turns.wait()
        if only_one_each:
            return result
        if Task.SPARSE in tasks:
            weights = len(result.rows[Task.SPARSE].values)
            self._count_weights(weights)
            self.hold(weights * BYTES_A_WEIGHT, "the response")
        head = handle.model.heads.multi_vector
        if Task.MULTI in tasks and head is not None:
            row_mask = multi_vector_mask(encoded.ids, cumulative(encoded.lengths), head, is_query=self._is_query)
            rows, role = result.rows[Task.MULTI].where(row_mask), head.role(self._is_query)
            if role.pooling is None:
                result.token_ids = encoded.ids[row_mask]
            else:  # milliseconds for a long text
                rows = await asyncio.to_thread(pool_texts, rows, role)
            result.rows[Task.MULTI] = rows
        return result

    def _check_rows(self, encoded: Encoded, tasks: Task) -> None:
        """Raises PayloadTooLarge for more rows of tokens than a response may have."""
        handle = self.handle
        if tasks == Task.TOKEN_CLASSES:
            self._count_weights(encoded.tokens * handle.token_labels)
        if not tasks & _A_ROW_A_TOKEN:
            return
        handle.admission.check_ready()  # an engine says what the limit is
        limit = handle.token_vector_limit
        self._shared.token_vectors += encoded.tokens
        if (tokens := self._shared.token_vectors) > limit:
            raise PayloadTooLarge(f"has {tokens} tokens, with a vector each", self._param, limit=limit)

    async def logits_of_tokens(self, encoded: Encoded) -> TaskOutput:
        """Rows of TOKEN_CLASSES. Whitespace may be no token at all: then there is nothing to ask an engine for."""
        if not encoded.sequences:
            return TaskOutput(np.empty((0, self.handle.token_labels), np.float32), np.zeros(1, np.int32))
        return (await self.run(encoded, Task.TOKEN_CLASSES)).rows[Task.TOKEN_CLASSES]

    def has_agent(self, product: bytes) -> bool:
        """True if the client is this product, by its User-Agent."""
        return any(name == b"user-agent" and product in value for name, value in self.scope["headers"])

    def _count_weights(self, weights: int) -> None:
        self._shared.weights += weights
        self.handle.limits.check_weights(self._shared.weights, self._param)

    @property
    def wants_raw(self) -> bool:
        """True if the client asks for raw rows instead of JSON."""
        accept = [value for name, value in self.scope["headers"] if name == b"accept"]
        return accept not in ([], [b"*/*"]) and prefers(OCTETS, JSON, accept)

    async def raw(self, vectors: npt.NDArray[np.float32], counts: Sequence[int] | None = None) -> tuple[bytes, Body]:
        """The response with float32 [n, d] as raw rows. `counts`: the rows of each text; None: one each."""
        self.headers.append((b"x-embedding-shape", b"%d,%d" % vectors.shape))
        if counts is not None:
            self.headers.append((b"x-sequence-rows", b",".join(b"%d" % count for count in counts)))
        return OCTETS, await raw_rows(vectors)

    def response_headers(self, content_type: bytes, size: int) -> list[tuple[bytes, bytes]]:
        """The header fields of a response with a body of `size` bytes."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % size)]
        if self._says_model:
            headers.append((b"x-model", self.handle.name.encode("latin-1", "replace")))
        headers += self.headers
        if self.truncated:
            headers.append((b"x-truncated-texts", b"%d" % self.truncated))
        if self._shared.ignored is not None:
            headers.append((b"x-embert-ignored-fields", header_value(self._shared.ignored)))
        headers += self.breakdown.headers(self.handle.compute_type)
        return headers


Handler = Callable[[RequestContext], Awaitable[tuple[bytes, Body]]]  # → content type, body


def _check_encoding(headers: list[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            encoding = describe_name(value.decode("latin-1"))
            reason = "`Content-Encoding` must be `identity`, that is not compressed"
            raise RequestError(reason, value=encoding, status=415)


# --- times ---


@dataclass(slots=True)
class LatencyBreakdown:
    """Times of one request, in seconds of perf_counter."""

    started: float = field(default_factory=time.perf_counter)
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    encode_s: float = 0.0
    engine: int = -1  # the last one that had the request; -1: none
    characters: int = 0
    tokens: int = 0
    received: float | None = None  # when the engine's result was complete

    def note(self, result: EncodeResult) -> None:
        self.queue_s, self.inference_s, self.engine = result.queue_s, result.inference_s, result.engine
        self.received = time.perf_counter()

    def note_failure(self, engine: int, waited_s: float) -> None:
        """The engine gave no rows: all of the time counts as time in its queue."""
        self.engine, self.queue_s = engine, waited_s

    def note_encoded(self) -> None:
        if self.received is not None:
            self.encode_s = time.perf_counter() - self.received

    def add(self, part: LatencyBreakdown) -> None:
        self.queue_s = min(self.queue_s, part.queue_s) if self.received is not None else part.queue_s
        self.tokenize_s += part.tokenize_s
        self.inference_s += part.inference_s
        self.engine = part.engine
        self.characters += part.characters
        self.tokens += part.tokens
        self.received = max(self.received or 0.0, part.received or 0.0) or None

    def headers(self, compute_type: bytes) -> list[tuple[bytes, bytes]]:
        """Header fields: TEI's in whole milliseconds, Server-Timing in fractions, of the same microseconds."""
        tokenize_us, queue_us = round(self.tokenize_s * 1e6), round(self.queue_s * 1e6)
        inference_us, total_us = round(self.inference_s * 1e6), round((time.perf_counter() - self.started) * 1e6)
        timing = b"tokenize;dur=%.3f, queue;dur=%.3f, inference;dur=%.3f, total;dur=%.3f" % (
            tokenize_us / 1000,
            queue_us / 1000,
            inference_us / 1000,
            total_us / 1000,
        )
        return [
            (b"x-compute-type", compute_type),
            (b"x-compute-time", b"%d" % ((tokenize_us + inference_us) // 1000)),
            (b"x-compute-characters", b"%d" % self.characters),
            (b"x-compute-tokens", b"%d" % self.tokens),
            (b"x-total-time", b"%d" % (total_us // 1000)),
            (b"x-tokenization-time", b"%d" % (tokenize_us // 1000)),
            (b"x-queue-time", b"%d" % (queue_us // 1000)),
            (b"x-inference-time", b"%d" % (inference_us // 1000)),
            (b"server-timing", timing),
        ]
