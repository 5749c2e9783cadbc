"""What the routes of one API process share: tokenizer, engines, limits, and the way from texts to vectors."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

from embert.engine import Encoded, Model, Task, Tokenizer
from embert.engine.heads.description import Classifier
from embert.engine.tasks import task_names
from embert.engine.tokenization.pairs import NO_PAIR_LIMITS, PairLimits
from embert.server.api.engines.pending import Receive
from embert.server.api.engines.router import Router
from embert.server.api.input.large_bodies import CooperativeSteps
from embert.server.api.input.request_body import TextsAndIds, describe_name
from embert.server.api.input.request_options import RequestOptions
from embert.server.api.input.text_pairs import PairTokenizer, TextPairs
from embert.server.api.input.texts_and_ids import GivenTexts, TextTokenizer
from embert.server.api.input.tokenizer_pool import TokenizerPool
from embert.server.api.latency_breakdown import LatencyBreakdown
from embert.server.config import ServeConfig
from embert.server.http.errors import Invalid, ModelUnknown, PayloadTooLarge, TaskMissing
from embert.server.http.timeouts import BodyReader
from embert.server.ipc.control import EngineInfo
from embert.server.observability.metrics import ApiMetrics
from embert.server.observability.scrapes import Scrapes

__all__ = ["TEI_NAME", "Service"]

ROLES = {True: "retrieval.query", False: "retrieval.passage"}  # adapters of queries and of documents, in jina's words
TEI_NAME = "text-embeddings-inference"  # what its users write into `model`, whatever it serves: no model's own name


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
        # Of texts whose request chooses none. The name is that of an adapter, too, where there is one of this name.
        self._default_name = (
            None if config.default_prompt is not None else (config.default_prompt_name or model.default_prompt_name)
        )
        self.default_prompt = config.default_prompt or ""
        if self._default_name is not None:
            self.default_prompt = model.prompts[self._default_name]
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

    def prompt(self, name: str | None, *, is_query: bool | None = None) -> str:
        """The text of a prompt; without a name, that of queries or of documents (None: neither), or the default one.

        Raises Invalid for a name that the model does not have.
        """
        if name is None:
            head = self.model.heads.multi_vector
            chosen = self.config.default_prompt is not None or self.config.default_prompt_name is not None
            if is_query is None or head is None or chosen:
                return self.default_prompt
            return head.role(is_query).prompt
        if name not in self.model.prompts:
            known = ", ".join(sorted(self.model.prompts)) or "none"
            raise Invalid(
                f"`prompt_name` must be one of the model's prompts ({known}); it is {describe_name(name)}",
                "prompt_name",
            )
        return self.model.prompts[name]

    def chosen(
        self, task: str | None, prompt_name: str | None, *, is_query: bool | None = None
    ) -> tuple[str | None, int]:
        """What a request chooses: the name of a prompt, None where it names none, and the number of an adapter or -1.

        The adapter is that of the task, else of the prompt's name, else that of queries or of documents (None:
        neither), else of the default prompt's name. Raises Invalid for a task that the model does not have.
        """
        adapters = self.model.architecture.adapters
        if adapters is None:
            if task is not None:
                raise Invalid(f"`task` is for models with adapters, and {self.served_name} has none", "task")
            return prompt_name, -1
        if task is not None and task not in adapters.names:
            known = ", ".join(adapters.names)
            raise Invalid(f"`task` must be one of the model's adapters ({known}); it is {describe_name(task)}", "task")
        role = None if is_query is None else ROLES[is_query]
        if task is None and prompt_name not in adapters.names and role in adapters.names:
            task = role
        name = prompt_name if prompt_name is not None else task
        return name, adapters.number(task or name or self._default_name)

    def is_query(self, input_type: str | None, tasks: Task) -> bool | None:
        """Whether texts are queries, by a field of the request; None where it makes no difference or is not said."""
        if Task.MULTI in tasks or (input_type is not None and self.model.architecture.adapters is not None):
            return input_type == "query"
        return None

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

    def names(self, name: str | None) -> bool:
        """Whether it is a name of the served model."""
        return name in (self.served_name, self.model.model_id)

    def check_model(self, name: str | None) -> None:
        """Raise ModelUnknown when `name` is another model than the served one, unless any name will do."""
        if name is not None and not (self.names(name) or name == TEI_NAME or self.config.any_model_name):
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

        `task` names one of the model's adapters. `is_query` says what a text is to a model of late interaction, or with
        adapters; None: a text as any. `limit` is for tokens of a text, special ones included; None: what the model
        takes.
        Raises Overloaded where the queue has no room for as many tokens as there are words: rejected texts are not
        tokenised.
        """
        texts = GivenTexts.of(given, param)
        self.check_count(len(texts.items), param)
        if texts.kind is not str and prompt_name is not None:
            raise Invalid("`prompt_name` cannot be used with token ids, which are taken as they are", "prompt_name")
        name, adapter = self.chosen(task, prompt_name, is_query=is_query)
        prompt = self.prompt(name, is_query=is_query)
        began = time.perf_counter()
        breakdown.characters = texts.characters
        self.admission.check_room(partial(texts.least_tokens, self.model.max_input_length), texts.most_tokens, options)
        encoded = await self._text_tokenizer.encode(
            texts,
            receive,
            options,
            partial(self.check_tokens, param=param, more=True),
            prompt=prompt,
            is_query=is_query,
            truncate=self.config.auto_truncate if truncate is None else truncate,
            direction=direction,
            param=param,
            limit=limit,
        )
        breakdown.tokenize_s = time.perf_counter() - began
        breakdown.tokens = encoded.tokens
        self.check_tokens(encoded.tokens, param)
        self._observe(encoded, breakdown)
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
