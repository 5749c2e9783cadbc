"""What the routes of one API process share: tokenizer, engines, limits, and the way from texts to vectors."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

from embert.engine import Encoded, Model, Tokenizer
from embert.engine.tokenization.pairs import NO_PAIR_LIMITS, PairLimits
from embert.server.api.engines.pending import Receive
from embert.server.api.engines.router import Router
from embert.server.api.input.large_bodies import CooperativeSteps
from embert.server.api.input.limits import RequestLimits
from embert.server.api.input.request_body import TextsAndIds
from embert.server.api.input.request_options import RequestOptions
from embert.server.api.input.text_pairs import PairTokenizer, TextPairs
from embert.server.api.input.texts_and_ids import GivenTexts, TextTokenizer
from embert.server.api.input.tokenizer_pool import TokenizerPool
from embert.server.api.latency_breakdown import LatencyBreakdown
from embert.server.api.served_model import ServedModel
from embert.server.config import ServeConfig
from embert.server.http.errors import Invalid
from embert.server.http.timeouts import BodyReader
from embert.server.ipc.control import EngineInfo
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.scraping.scrapes import Scrapes

__all__ = ["Service"]


class Service:
    """One per API process."""

    def __init__(
        self, config: ServeConfig, model: Model, tokenizer: Tokenizer, router: Router, metrics: ApiMetrics
    ) -> None:
        self.config = config
        self.model = model
        self.served = ServedModel(config, model)
        self.limits = RequestLimits(config)
        self.tokenizer = tokenizer
        self.router = router
        self.admission = router.admission
        self.metrics = metrics
        self.scrapes = Scrapes(self.write_metrics)
        self.bodies = BodyReader(config.payload_limit, config.body_budget, config.client_timeout)
        self.parse_steps = CooperativeSteps(config.body_budget)
        self.most_ids = config.max_client_batch_size * model.max_input_length
        self.tokenizer_pool = TokenizerPool(
            config.tokenization_threads, config.payload_limit, self.admission.check_time
        )
        self._text_tokenizer = TextTokenizer(tokenizer, self.tokenizer_pool, config.max_unbroken_characters)
        self._pair_tokenizer = PairTokenizer(tokenizer, self.tokenizer_pool, config.max_unbroken_characters)

    @property
    def engine(self) -> EngineInfo | None:
        """What the engines are, once one has started."""
        return next((state.info for state in self.router.engines if state.info is not None), None)

    @property
    def max_queue_tokens(self) -> int:
        """Admission budget of the whole server, in tokens."""
        return self.admission.max_queue_tokens

    @property
    def queue_limit(self) -> int:
        """Tokens of the whole server that may be admitted now; see Admission.queue_limit."""
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

    def check_open(self) -> None:
        """Raise Unavailable when the server is shutting down."""
        if self.admission.draining:
            self.admission.check_ready()

    async def tokenize(
        self,
        given: TextsAndIds,
        receive: Receive,
        breakdown: LatencyBreakdown,
        options: RequestOptions,
        *,
        param: str,
        truncate: bool | None,
        direction: Any = "right",
        task: str | None = None,
        prompt_name: str | None,
        is_query: bool | None = None,
        limit: int | None = None,
    ) -> Encoded:
        """Texts or ids, checked, to packed ids. Raises the ServerError that says what is wrong with them.

        `task` names one of the model's adapters. `is_query`: whether the texts are queries or documents, to a model of
        late interaction or with adapters; None: neither. `limit`: the most tokens of a text, special ones included;
        None: as many as the model takes.
        Raises Overloaded where the queue has no room for as many tokens as there are words: rejected texts are not
        tokenised.
        """
        texts = GivenTexts.of(given, param)
        self.limits.check_count(len(texts.items), param)
        if texts.kind is not str and prompt_name is not None:
            raise Invalid("`prompt_name` cannot be used with token ids, which are taken as they are", "prompt_name")
        name, adapter = self.served.chosen(task, prompt_name, is_query=is_query)
        prompt = self.served.prompt(name, is_query=is_query)
        began = time.perf_counter()
        breakdown.characters = texts.characters
        self.admission.check_room(partial(texts.least_tokens, self.model.max_input_length), texts.most_tokens, options)
        encoded = await self._text_tokenizer.encode(
            texts,
            receive,
            options,
            partial(self.limits.check_tokens, param=param, more=True),
            prompt=prompt,
            is_query=is_query,
            truncate=self.config.auto_truncate if truncate is None else truncate,
            direction=direction,
            param=param,
            limit=limit,
        )
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.limits.check_tokens(encoded.tokens, param)
        self._observe(encoded, options)
        return encoded if adapter < 0 else dataclasses.replace(encoded, adapter=adapter)

    async def tokenize_pairs(
        self,
        texts: TextPairs,
        receive: Receive,
        breakdown: LatencyBreakdown,
        options: RequestOptions,
        *,
        params: tuple[str, str],
        truncate: bool | None,
        direction: Any = "right",
        limits: PairLimits = NO_PAIR_LIMITS,
    ) -> Encoded:
        """Pairs of texts, which the caller has counted, to packed ids. Bounds and errors are those of `tokenize`.

        `params` are the request fields of first and second texts. The default prompt precedes first texts.
        """
        began = time.perf_counter()
        breakdown.characters = texts.characters
        least = partial(texts.least_tokens, self.model.max_input_length, limits)
        self.admission.check_room(least, texts.most_tokens, options)
        if prompt := self.served.default_prompt:
            texts = TextPairs([prompt + first for first in texts.firsts], texts.seconds)
        encoded = await self._pair_tokenizer.encode(
            texts,
            receive,
            options,
            partial(self.limits.check_pair_tokens, param=params[1], more=True),
            params=params,
            truncate=self.config.auto_truncate if truncate is None else truncate,
            direction=direction,
            limits=limits,
        )
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.limits.check_pair_tokens(encoded.tokens, params[1])
        self._observe(encoded, options)
        return encoded

    def _observe(self, encoded: Encoded, options: RequestOptions) -> None:
        work = self.metrics.work(self.served.name, options.priority)
        work.texts += encoded.sequences
        work.tokens += encoded.tokens
        work.truncated_texts += encoded.truncated
        work.request_texts.observe(encoded.sequences)
        work.text_tokens.observe_many(encoded.lengths.tolist())

    def write_metrics(self) -> None:
        """Make everything that happened until now visible to scrapes."""
        self.metrics.admitted_tokens = self.admission.admitted_tokens
        self.metrics.queue_limit = self.admission.queue_limit
        self.metrics.write()

    def close(self) -> None:
        """Stop the threads."""
        self.scrapes.close()
        self.tokenizer_pool.close()
