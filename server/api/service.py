"""What the routes of one API process share: tokenizer, engines, limits, and the way from texts to vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from embert.engine import Encoded, Model, Task, Tokenizer
from embert.engine.heads.description import Classifier
from embert.engine.tasks import task_names
from embert.engine.tokenization.pairs import NO_PAIR_LIMITS, PairLimits
from embert.server.api.engines.pending import Receive
from embert.server.api.engines.router import Router
from embert.server.api.input.large_bodies import CooperativeSteps
from embert.server.api.input.request_body import TextOrIds, describe_name
from embert.server.api.input.request_options import RequestOptions
from embert.server.api.input.text_pairs import PairTokenizer, TextPairs
from embert.server.api.input.tokenizer_pool import TokenizerPool, input_errors
from embert.server.api.latency_breakdown import LatencyBreakdown
from embert.server.config import ServeConfig
from embert.server.http.errors import EmptyInput, Invalid, ModelUnknown, PayloadTooLarge, TaskMissing
from embert.server.http.timeouts import BodyReader
from embert.server.ipc.control import EngineInfo
from embert.server.observability.metrics import ApiMetrics
from embert.server.observability.scrapes import Scrapes

__all__ = ["Service"]

# Up to so many are tokenised on the event loop, which costs less than the way to a thread and back.
_INLINE_CHARACTERS = 4096
_INLINE_KNOWN_CHARACTERS = 65536  # where the word cache knows all words: half a millisecond
_INLINE_IDS = 16384
_WORDS_SOUGHT_IN = 262_144  # characters: a few milliseconds on the event loop


class Service:
    """One per API process."""

    def __init__(
        self, config: ServeConfig, model: Model, tokenizer: Tokenizer, router: Router, metrics: ApiMetrics
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.router = router
        self.admission = router.admission
        self.metrics = metrics
        self.scrapes = Scrapes(self.write_metrics)
        self.served_name = config.served_model_name or model.model_id
        self.default_prompt = self._default_prompt()
        self.bodies = BodyReader(config.payload_limit, config.body_budget, config.client_timeout)
        self.parse_steps = CooperativeSteps(config.body_budget)
        self.most_ids = config.max_client_batch_size * model.max_input_length
        self.tokenizer_pool = TokenizerPool(
            config.tokenization_threads, config.payload_limit, self.admission.check_time
        )
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
        """The text of a prompt, or of the default one. Raises Invalid for a name that the model does not have."""
        if name is None:
            return self.default_prompt
        if name not in self.model.prompts:
            known = ", ".join(sorted(self.model.prompts)) or "none"
            raise Invalid(
                f"`prompt_name` must be one of the model's prompts ({known}); it is {describe_name(name)}",
                "prompt_name",
            )
        return self.model.prompts[name]

    @property
    def classifier(self) -> Classifier:
        """The classification head. Raises TaskMissing where the model has none."""
        self.check_tasks(Task.CLASSIFY)
        classifier = self.model.heads.classifier
        assert classifier is not None  # noqa: S101 - the task is made of it
        return classifier

    @property
    def task_names(self) -> list[str]:
        """The model's tasks; a classifier of one label also reranks."""
        classifier = self.model.heads.classifier
        return task_names(self.model.tasks) + ["rerank"] * (classifier is not None and len(classifier.labels) == 1)

    def check_tasks(self, needed: Task, *, reranks: bool = False) -> None:
        """Raise TaskMissing where the model does not have all these tasks, or is to rerank and cannot."""
        has = self.task_names
        missing = [name for name in task_names(needed) if name not in has]
        if reranks and "rerank" not in has:
            missing = ["rerank"]
        if missing:
            word = f"task{'s' * (len(missing) > 1)} {', '.join(missing)}"
            labels = len(self.classifier.labels) if reranks and Task.CLASSIFY in self.model.tasks else 1
            why = f", which needs a model of one label and not of {labels}" if labels > 1 else ""
            raise TaskMissing(f"{self.served_name} does not have the {word}{why}; it has {', '.join(has)}")

    def check_model(self, name: str | None) -> None:
        """Raise ModelUnknown when `name` is another model than the served one."""
        if name is not None and name not in (self.served_name, self.model.model_id):
            raise ModelUnknown(f"`model` must be {self.served_name}; it is {describe_name(name)}", "model")

    def check_dimensions(self, dimensions: int | None) -> int:
        """`dimensions` for the engine, where 0 means all. Raises Invalid outside 1 … width."""
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

    def check_documents(self, count: int, param: str) -> None:
        """Raise PayloadTooLarge for more documents than one request may have."""
        limit = self.config.max_client_documents
        if count > limit:
            raise PayloadTooLarge(f"`{param}` has {count} texts; the limit is {limit} (--max-client-documents)", param)

    def check_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """Raise PayloadTooLarge for more tokens than one request may have; `more`: not all are counted yet."""
        limit = self.config.max_client_batch_tokens
        if limit is not None and tokens > limit:
            has = f"at least {tokens}" if more else f"{tokens}"
            raise PayloadTooLarge(
                f"`{param}` has {has} tokens; the limit is {limit} (--max-client-batch-tokens)", param
            )

    def check_pair_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """As `check_tokens` for pairs, whose texts may be in several: no more tokens than a body may have bytes."""
        self.check_tokens(tokens, param, more=more)
        limit = self.config.payload_limit
        if tokens > limit:
            has = f"at least {tokens}" if more else f"{tokens}"
            raise PayloadTooLarge(
                f"`{param}` makes pairs of {has} tokens; the limit is {limit} (--payload-limit)", param
            )

    def check_answer(self, tokens: int, param: str, *, more: bool = False) -> None:
        """Raise PayloadTooLarge for more tokens than one answer of /tokenize or /decode may be about."""
        self.check_tokens(tokens, param, more=more)
        limit = self.config.max_answer_tokens
        if tokens > limit:
            has = f"at least {tokens}" if more else f"{tokens}"
            raise PayloadTooLarge(f"`{param}` has {has} tokens; the limit is {limit} (--max-answer-tokens)", param)

    def check_open(self) -> None:
        """Raise Unavailable when the server is shutting down."""
        if self.admission.draining:
            self.admission.check_ready()

    async def tokenize(
        self,
        given: TextOrIds,
        receive: Receive,
        breakdown: LatencyBreakdown,
        options: RequestOptions,
        *,
        param: str,
        truncate: bool | None,
        direction: Any = "right",
        prompt_name: str | None,
    ) -> Encoded:
        """Texts or ids, checked, to packed ids. Raises the ServerError that says what is wrong with them.

        Raises Overloaded where the queue has no room for as many tokens as there are words: rejected texts are not
        tokenised.
        """
        sequences, is_text = self.sequences(given, param)
        self.check_count(len(sequences), param)
        how: dict[str, Any] = {
            "truncate": self.config.auto_truncate if truncate is None else truncate,
            "direction": direction,
            "param": param,
        }
        began = time.perf_counter()
        size = sum(map(len, sequences))  # characters or ids
        tokenizer = self.tokenizer
        at_once: Callable[..., Encoded | None] | None
        if is_text:
            how["prompt"] = self.prompt(prompt_name)
            breakdown.characters = size
            most = size + 2 * len(sequences)
            at_once = tokenizer.encode
            if size > _INLINE_CHARACTERS:
                at_once = tokenizer.encode_known if size <= _INLINE_KNOWN_CHARACTERS else None
        else:
            if prompt_name is not None:
                raise Invalid("`prompt_name` cannot be used with token ids, which are taken as they are", "prompt_name")
            most = size
            at_once = tokenizer.from_ids if size <= _INLINE_IDS else None
        self.admission.check_room(partial(_least_tokens, sequences, self.model.max_input_length), most, options)
        with input_errors():
            encoded = at_once(sequences, **how) if at_once is not None else None
            if encoded is None:
                if is_text:
                    limit = self.config.max_unbroken_characters
                    turns = tokenizer.encode_turns(sequences, **how, most_unbroken=limit)
                else:
                    turns = tokenizer.from_ids_turns(sequences, **how)
                check = partial(self.check_tokens, param=param, more=True)
                encoded = await self.tokenizer_pool.run(turns, size, receive, options, check)
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.check_tokens(encoded.tokens, param)
        self._observe(encoded, breakdown)
        return encoded

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
        if self.default_prompt:
            texts = TextPairs([self.default_prompt + first for first in texts.firsts], texts.seconds)
        encoded = await self._pair_tokenizer.encode(
            texts,
            receive,
            options,
            partial(self.check_pair_tokens, param=params[1], more=True),
            params=params,
            truncate=self.config.auto_truncate if truncate is None else truncate,
            direction=direction,
            limits=limits,
        )
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.check_pair_tokens(encoded.tokens, params[1])
        self._observe(encoded, breakdown)
        return encoded

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

    def _observe(self, encoded: Encoded, breakdown: LatencyBreakdown) -> None:
        metrics = self.metrics
        metrics.tokenize_duration.observe(breakdown.tokenize_s)
        metrics.texts += encoded.sequences
        metrics.tokens += encoded.tokens
        metrics.truncated_texts += encoded.truncated
        metrics.request_texts.observe(encoded.sequences)
        metrics.text_tokens.observe_many(encoded.lengths.tolist())

    def write_metrics(self) -> None:
        """Make everything that happened until now visible to scrapes."""
        self.metrics.admitted_tokens = self.admission.admitted_tokens
        self.metrics.queue_limit = self.admission.queue_limit
        self.metrics.write()

    def close(self) -> None:
        """Stop the threads."""
        self.scrapes.close()
        self.tokenizer_pool.close()


def _least_tokens(sequences: Sequence[Any], longest: int) -> int:
    """A lower bound for texts or lists of ids, cut to `longest`: no token spans a space. Reads only the beginning."""
    tokens = 0
    characters = _WORDS_SOUGHT_IN
    for each in sequences:
        if isinstance(each, str):
            words = len(each[:characters].split(maxsplit=longest))
            characters -= len(each)
            if characters <= 0:
                return tokens + min(words, longest)
            tokens += min(words, longest)
        else:
            tokens += min(len(each), longest)
    return tokens
