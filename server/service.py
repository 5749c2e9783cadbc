"""What the routes of one API process share: tokenizer, engines, limits, and the way from texts to vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from engine import Encoded, Model, Tokenizer
from engine.errors import InputError
from server.config import ServeConfig
from server.control import EngineInfo
from server.engine_client import Answer, EngineClient, Receive
from server.errors import EmptyInput, Invalid, ModelUnknown, PayloadTooLarge
from server.metrics import ApiMetrics, Scrapes
from server.schemas import TextOrIds, describe_name
from server.slow_clients import BodyReader
from server.terms import Terms

__all__ = ["Service", "Timing"]

_INLINE_CHARACTERS = 4096  # tokenised on the loop, which costs less than the way to a thread and back
_INLINE_KNOWN_CHARACTERS = 65536  # ... even if so many, where all words are known: half a millisecond
_INLINE_IDS = 16384

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Timing:
    """Where a request's time went, for its answer's headers. Seconds of perf_counter."""

    started: float = field(default_factory=time.perf_counter)
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    characters: int = 0
    tokens: int = 0
    answered: float | None = None  # when the vectors were here

    def note(self, answer: Answer) -> None:
        """Take over the engine's times."""
        self.queue_s, self.inference_s, self.answered = answer.queue_s, answer.inference_s, time.perf_counter()

    def headers(self, compute_type: bytes) -> list[tuple[bytes, bytes]]:
        """TEI's headers in whole milliseconds, Server-Timing in fractions; both of the same whole microseconds."""
        total_us = round((time.perf_counter() - self.started) * 1e6)
        tokenize_us, queue_us = round(self.tokenize_s * 1e6), round(self.queue_s * 1e6)
        inference_us = round(self.inference_s * 1e6)
        return [
            (b"x-compute-type", compute_type),
            (b"x-compute-time", b"%d" % ((tokenize_us + inference_us) // 1000)),
            (b"x-compute-characters", b"%d" % self.characters),
            (b"x-compute-tokens", b"%d" % self.tokens),
            (b"x-total-time", b"%d" % (total_us // 1000)),
            (b"x-tokenization-time", b"%d" % (tokenize_us // 1000)),
            (b"x-queue-time", b"%d" % (queue_us // 1000)),
            (b"x-inference-time", b"%d" % (inference_us // 1000)),
            (
                b"server-timing",
                b"tokenize;dur=%d.%03d, queue;dur=%d.%03d, inference;dur=%d.%03d, total;dur=%d.%03d"
                % (
                    *divmod(tokenize_us, 1000),
                    *divmod(queue_us, 1000),
                    *divmod(inference_us, 1000),
                    *divmod(total_us, 1000),
                ),
            ),
        ]


class Service:
    """One per API process."""

    def __init__(
        self, config: ServeConfig, model: Model, tokenizer: Tokenizer, client: EngineClient, metrics: ApiMetrics
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics
        self.scrapes = Scrapes(self.write_metrics)
        self.served_name = config.served_model_name or model.model_id
        self.default_prompt = self._default_prompt()
        self.bodies = BodyReader(config.payload_limit, config.client_timeout)
        self._threads = ThreadPoolExecutor(config.tokenization_threads, "tokenize")

    @property
    def engine(self) -> EngineInfo | None:
        """What the engines are, once one has started."""
        return next((state.info for state in self.client.engines if state.info is not None), None)

    @property
    def max_queue_tokens(self) -> int:
        """Admission budget of the whole server, in tokens."""
        return self.client.max_queue_tokens

    @property
    def queue_limit(self) -> int:
        """Tokens of the whole server that may be admitted now: the budget, or fewer where it would take too long."""
        return self.client.queue_limit

    @property
    def compute_type(self) -> bytes:
        """For the header: `cpu`, or `gpu+NVIDIA H100`."""
        engine = self.engine
        if engine is None or engine.device == "cpu":
            return b"cpu"
        return f"gpu+{engine.device_name}".encode("latin-1", "replace")

    @property
    def token_vector_limit(self) -> int:
        """Most tokens of one `/embed_all` request: one batch, since a token's vector is as large as a text's."""
        engine = self.engine
        return engine.max_batch_tokens if engine is not None else self.model.max_input_length

    def _default_prompt(self) -> str:
        config, model = self.config, self.model
        if config.default_prompt is not None:
            return config.default_prompt
        name = config.default_prompt_name or model.default_prompt_name
        return model.prompts[name] if name is not None else ""

    def prompt(self, name: str | None) -> str:
        """The text of a prompt, or the default's. Raises Invalid for a name the model does not have."""
        if name is None:
            return self.default_prompt
        if name not in self.model.prompts:
            known = ", ".join(sorted(self.model.prompts)) or "none"
            raise Invalid(
                f"`prompt_name` must be one of the model's prompts ({known}); it is {describe_name(name)}",
                "prompt_name",
            )
        return self.model.prompts[name]

    def check_model(self, name: str | None) -> None:
        """Raise ModelUnknown when `name` is another model than the served one."""
        if name is not None and name not in (self.served_name, self.model.model_id):
            raise ModelUnknown(f"`model` must be {self.served_name}; it is {describe_name(name)}", "model")

    def check_dimensions(self, dimensions: int | None) -> int:
        """`dimensions` for the engine, 0 meaning all. Raises Invalid outside 1 … width."""
        if dimensions is None:
            return 0
        if not 1 <= dimensions <= self.model.width:
            raise Invalid(f"`dimensions` must be 1 to {self.model.width}; it is {dimensions}", "dimensions")
        return 0 if dimensions == self.model.width else dimensions

    def check_count(self, count: int, param: str) -> None:
        """Raise PayloadTooLarge for more texts than one request may have."""
        limit = self.config.max_client_batch_size
        if count > limit:
            raise PayloadTooLarge(f"`{param}` has {count} texts; the limit is {limit} (--max-client-batch-size)", param)

    def check_tokens(self, tokens: int, param: str) -> None:
        """Raise PayloadTooLarge for more tokens than one request may have."""
        limit = self.config.max_client_batch_tokens
        if limit is not None and tokens > limit:
            raise PayloadTooLarge(
                f"`{param}` has {tokens} tokens; the limit is {limit} (--max-client-batch-tokens)", param
            )

    async def tokenize(
        self,
        given: TextOrIds,
        timing: Timing,
        terms: Terms,
        *,
        param: str,
        truncate: bool | None,
        direction: Any = "right",
        prompt_name: str | None,
    ) -> Encoded:
        """Texts or ids, checked, to packed ids. Raises the ServerError that says what is wrong with them.

        Raises Overloaded where the queue has no room for as many tokens as there are words: a flood is not tokenised.
        """
        sequences, is_text = self.sequences(given, param)
        self.check_count(len(sequences), param)
        cut = self.config.auto_truncate if truncate is None else truncate
        began = time.perf_counter()
        if is_text:
            prompt = self.prompt(prompt_name)
            timing.characters = sum(map(len, sequences))
            most = timing.characters + 2 * len(sequences)
            how: dict[str, Any] = {"truncate": cut, "direction": direction, "prompt": prompt, "param": param}
            work = partial(self.tokenizer.encode, sequences, **how)
            at_once: Callable[[], Encoded | None] | None = work
            if timing.characters > _INLINE_CHARACTERS:
                known = timing.characters <= _INLINE_KNOWN_CHARACTERS
                at_once = partial(self.tokenizer.encode_known, sequences, **how) if known else None
        else:
            if prompt_name is not None:
                raise Invalid("`prompt_name` cannot be used with token ids, which are taken as they are", "prompt_name")
            work = partial(self.tokenizer.from_ids, sequences, truncate=cut, direction=direction, param=param)
            most = sum(map(len, sequences))
            at_once = work if most <= _INLINE_IDS else None
        self.client.check_room(partial(_least_tokens, sequences, self.model.max_input_length), most, terms)
        with _input_errors():
            encoded = at_once() if at_once is not None else None
            if encoded is None:
                encoded = await self._in_thread(work)
        timing.tokenize_s = time.perf_counter() - began
        timing.tokens = encoded.tokens
        self.check_tokens(encoded.tokens, param)
        self._observe(encoded, timing)
        return encoded

    async def in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Run the tokenizer's `work` beside the loop; its InputError becomes Invalid."""
        with _input_errors():
            return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode(self, encoded: Encoded, receive: Receive, terms: Terms, timing: Timing, **how: Any) -> Answer:
        """Through an engine; see EngineClient.encode."""
        answer = await self.client.encode(encoded, receive, terms, **how)
        timing.note(answer)
        return answer

    def sequences(self, given: TextOrIds, param: str) -> tuple[Sequence[Any], bool]:
        """A list of texts or of id lists, and which of the two. Raises EmptyInput when there is nothing to encode."""
        if isinstance(given, str):
            given = [given]
        if not given:
            raise EmptyInput(f"`{param}` must not be an empty list", param)
        if isinstance(given[0], int):
            return [given], False
        for index, sequence in enumerate(given):
            if not sequence:
                name = f"{param}[{index}]" if len(given) > 1 else param
                raise EmptyInput(f"`{name}` must not be empty", param)
        return given, isinstance(given[0], str)

    def _observe(self, encoded: Encoded, timing: Timing) -> None:
        metrics = self.metrics
        metrics.tokenize_duration.observe(timing.tokenize_s)
        metrics.texts += encoded.sequences
        metrics.tokens += encoded.tokens
        metrics.truncated_texts += encoded.truncated
        metrics.request_texts.observe(encoded.sequences)
        metrics.text_tokens.observe_many(encoded.lengths.tolist())

    def write_metrics(self) -> None:
        """Make what happened until now visible to scrapes."""
        self.metrics.admitted_tokens = self.client.admitted_tokens
        self.metrics.queue_limit = self.client.queue_limit
        self.metrics.write()

    def close(self) -> None:
        """Stop the threads."""
        self.scrapes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _least_tokens(sequences: Sequence[Any], longest: int) -> int:
    """Of texts or lists of ids, cut to `longest`: no tokenizer joins what a space divides."""
    return sum(min(len(each.split() if isinstance(each, str) else each), longest) for each in sequences)


@contextmanager
def _input_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise Invalid(str(error), error.param, kind=error.kind.capitalize()) from None
