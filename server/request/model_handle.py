"""One model of an API process: its tokenizer, its limits, and the way from texts to token ids that engines take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import cached_property, partial

from embert.engine import Encoded, Model, Task, Tokenizer
from embert.server.config import ModelConfig, ServeConfig
from embert.server.engine_client.pending import Receive
from embert.server.engine_client.router import Router
from embert.server.http.errors import Invalid, PayloadTooLarge
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.control import ModelInfo
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.request.latency_breakdown import LatencyBreakdown
from embert.server.request.request_body import TextsAndIds
from embert.server.request.serialization import BYTES_A_NUMBER, BYTES_A_WEIGHT
from embert.server.request.served_model import ServedModel
from embert.server.request.text_pairs import PairTokenizeOptions, PairTokenizer, TextPairs
from embert.server.request.texts_and_ids import InputTexts, TextTokenizer, TokenizeOptions
from embert.server.request.tokenizer_pool import TokenizerPool

__all__ = ["ModelHandle"]

_QUICK_TOKENS = 128  # so few are tokenized without a look at the queue first


class ModelHandle:
    """One per model and API process; ModelRegistry has what they share."""

    def __init__(
        self,
        config: ModelConfig,
        model: Model,
        tokenizer: Tokenizer,
        router: Router,
        metrics: ApiMetrics,
        pool: TokenizerPool,
        number: int = 0,
    ) -> None:
        """`number` is the model's in messages between processes."""
        self.config = config
        self.number = number
        self.model = model
        self.served = ServedModel(config, model)
        self.limits = RequestLimits(config)
        self.tokenizer = tokenizer
        self.router = router
        self.admission = router.admissions[number]
        self.metrics = metrics
        self.most_ids = config.max_client_batch_size * model.max_input_length
        self.tokenizer_pool = pool
        self._text_tokenizer = TextTokenizer(tokenizer, pool, config.max_unbroken_characters)
        self._pair_tokenizer = PairTokenizer(tokenizer, pool, config.max_unbroken_characters)

    @property
    def engine(self) -> ModelInfo | None:
        """What the model is on the engines, once one has it."""
        return self.router.info(self.number)

    @property
    def state(self) -> str:
        """`ready`, `loading` (again, too), or `failed`."""
        if self.router.connected(self.number):
            return "ready"
        return "failed" if self.admission.failed else "loading"

    @property
    def max_queue_tokens(self) -> int:
        """Admission budget of the model in the whole server, in tokens."""
        return self.admission.max_queue_tokens

    @property
    def queue_limit(self) -> int:
        """Tokens of the model that may be admitted now in the whole server; see Admission.queue_limit."""
        return self.admission.queue_limit

    @property
    def compute_type(self) -> bytes:
        """For the header: `cpu`, or `gpu+NVIDIA H100`."""
        engine = self.engine
        if engine is None or engine.device == "cpu":
            return b"cpu"
        return f"gpu+{engine.device_name}".encode("latin-1", "replace")

    @property
    def token_vector_limit(self) -> int:
        """Most tokens of a request for a vector a token: one batch, since such a vector is as large as a text's."""
        engine = self.engine
        return engine.max_batch_tokens if engine is not None else self.model.max_input_length

    @cached_property
    def labels(self) -> int:
        """How many scores a text has; 0 without a classification head."""
        classifier = self.model.heads.classifier
        return 0 if classifier is None else len(classifier.labels)

    @cached_property
    def _embed_bytes(self) -> int:
        return self.model.width * BYTES_A_NUMBER

    @cached_property
    def _row_bytes(self) -> dict[Task, int]:
        """Of the other tasks, but sparse vectors, whose size is known only afterwards."""
        classifier, multi = self.model.heads.classifier, self.model.heads.multi_vector
        labels = () if classifier is None else classifier.labels
        return {
            Task.TOKENS: self.model.config.hidden_size * BYTES_A_NUMBER,
            Task.CLASSIFY: sum(BYTES_A_WEIGHT + len(label.encode()) for label in labels),
            Task.MULTI: 0 if multi is None else multi.layers[-1].outputs * BYTES_A_NUMBER,
        }

    def answer_bytes(self, encoded: Encoded, tasks: Task, dimensions: int = 0) -> int:
        """About the bytes of an answer in JSON, with the numbers that it is written from; without sparse vectors."""
        if tasks == Task.EMBED:
            return encoded.sequences * (dimensions * BYTES_A_NUMBER or self._embed_bytes)
        size = encoded.sequences * self._embed_bytes if tasks & Task.EMBED else 0
        for task, row_bytes in self._row_bytes.items():
            if task & tasks:
                size += (encoded.sequences if task == Task.CLASSIFY else encoded.tokens) * row_bytes
        return size

    def check_open(self) -> None:
        """Raise Unavailable when the server is shutting down."""
        if self.admission.draining:
            self.admission.check_ready()

    def check_limit(
        self, limit: int | None, *, is_query: bool | None = None, param: str = "truncate_prompt_tokens"
    ) -> int | None:
        """The `limit` of `tokenize` in a request's words: -1, or None, for what the model takes. Raises Invalid."""
        if limit is None or limit == -1:
            return None
        least = self.tokenizer.least_limit(is_query)
        if limit < least:
            either = "-1 or " if param == "truncate_prompt_tokens" else ""
            raise Invalid(f"`{param}` must be {either}at least {least}; it is {limit}", param)
        return limit

    async def tokenize(
        self,
        inputs: TextsAndIds,
        receive: Receive,
        breakdown: LatencyBreakdown,
        request: RequestOptions,
        param: str,
        options: TokenizeOptions,
    ) -> Encoded:
        """Texts or ids of the field `param`, checked, to packed ids. Raises the ServerError of what is wrong with them.

        Raises Overloaded, before tokenizing, where the queue cannot take as many tokens as there are words.
        """
        truncate, direction, limit, task, prompt_name, is_query = options
        texts = InputTexts.of(inputs, param)
        self.limits.check_count(len(texts.items), param)
        if texts.kind is not str and prompt_name is not None:
            raise Invalid("`prompt_name` cannot be used with token ids, which are taken as they are", "prompt_name")
        name, adapter = self.served.chosen(task, prompt_name, is_query=is_query)
        prompt = self.served.prompt(name, is_query=is_query)
        began = time.perf_counter()
        breakdown.characters = texts.characters
        if texts.most_tokens > _QUICK_TOKENS:
            least = partial(texts.least_tokens, self.model.max_input_length)
            self.admission.check_capacity(least, texts.most_tokens, request)
        encoded = await self._text_tokenizer.encode(
            texts,
            receive,
            self.checking(request, partial(self.limits.check_tokens, param=param, more=True)),
            {
                "truncate": self.config.auto_truncate if truncate is None else truncate,
                "direction": direction,
                "prompt": prompt,
                "param": param,
                "is_query": is_query,
                "limit": limit,
            },
        )
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.limits.check_tokens(encoded.tokens, param)
        self._observe(encoded, request)
        return encoded if adapter < 0 else dataclasses.replace(encoded, adapter=adapter)

    async def tokenize_pairs(
        self,
        texts: TextPairs,
        receive: Receive,
        breakdown: LatencyBreakdown,
        request: RequestOptions,
        params: tuple[str, str],
        options: PairTokenizeOptions,
    ) -> Encoded:
        """Pairs of texts, which the caller has counted, to packed ids. Bounds and errors are those of `tokenize`.

        `params` are the request fields of first and second texts. The default prompt precedes first texts.
        """
        began = time.perf_counter()
        breakdown.characters = texts.characters
        least = partial(texts.least_tokens, self.model.max_input_length, options.limits)
        self.admission.check_capacity(least, texts.most_tokens, request)
        if prompt := self.served.default_prompt:
            texts = TextPairs([prompt + first for first in texts.firsts], texts.seconds)
        encoded = await self._pair_tokenizer.encode(
            texts,
            receive,
            self.checking(request, partial(self.limits.check_pair_tokens, param=params[1], more=True)),
            {
                "truncate": self.config.auto_truncate if options.truncate is None else options.truncate,
                "direction": options.direction,
                "limits": options.limits,
                "params": params,
            },
        )
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.limits.check_pair_tokens(encoded.tokens, params[1])
        self._observe(encoded, request)
        return encoded

    def checking(self, request: RequestOptions, check: Callable[[int], None]) -> Callable[[int], None]:
        """For TokenizerPool.run: `check`, and Unavailable once the request is out of time."""

        def both(tokens: int) -> None:
            check(tokens)
            self.admission.check_time(request)

        return both

    def _observe(self, encoded: Encoded, request: RequestOptions) -> None:
        work = self.metrics.work(self.served.name, request.priority)
        work.texts += encoded.sequences
        work.tokens += encoded.tokens
        work.truncated_texts += encoded.truncated
        work.request_texts.observe(encoded.sequences)
        work.text_tokens.observe_many(encoded.lengths.tolist())


class RequestLimits:
    """The limits of the server's options. Each check raises PayloadTooLarge, naming the field `param` and the option.

    With `more`, not everything is counted yet.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config

    def check_count(self, count: int, param: str) -> None:
        """The texts of a request."""
        limit = self._config.max_client_batch_size
        if count > limit:
            raise PayloadTooLarge(f"`{param}` has {count} texts; the limit is {limit} (--max-client-batch-size)", param)

    def check_documents(self, count: int, param: str) -> None:
        """The documents or pairs of a request."""
        limit = self._config.max_client_documents
        if count > limit:
            raise PayloadTooLarge(f"`{param}` has {count} texts; the limit is {limit} (--max-client-documents)", param)

    def check_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of a request."""
        limit = self._config.max_client_batch_tokens
        if limit is not None and tokens > limit:
            has = _number(tokens, more)
            raise PayloadTooLarge(
                f"`{param}` has {has} tokens; the limit is {limit} (--max-client-batch-tokens)", param
            )

    def check_pair_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of pairs, whose texts may be in several: no more than a body may have bytes."""
        self.check_tokens(tokens, param, more=more)
        limit = self._config.payload_limit
        if tokens > limit:
            has = _number(tokens, more)
            raise PayloadTooLarge(
                f"`{param}` makes pairs of {has} tokens; the limit is {limit} (--payload-limit)", param
            )

    def check_answer(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens that an answer of /tokenize or /decode is about."""
        self.check_tokens(tokens, param, more=more)
        limit = self._config.max_answer_tokens
        if tokens > limit:
            has = _number(tokens, more)
            raise PayloadTooLarge(f"`{param}` has {has} tokens; the limit is {limit} (--max-answer-tokens)", param)

    def check_weights(self, weights: int, param: str) -> None:
        """The weights of an answer's sparse vectors, counted while they come, and its scores of labels."""
        limit = self._config.max_answer_weights
        if weights > limit:
            raise PayloadTooLarge(
                f"the answer to `{param}` has at least {weights} weights or scores; the limit is {limit} "
                "(--max-answer-weights)",
                param,
            )


def _number(count: int, more: bool) -> str:
    return f"at least {count}" if more else f"{count}"
