"""One model of an HTTP process: its name, tasks and prompts, its tokenizer, its limits, and the errors about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from embert.engine import Encoded, Model, Task, Tokenizer
from embert.engine.heads.description import Classifier, TokenClassifier
from embert.engine.models.flops import PLAIN_TOKENS, TokenCounts
from embert.engine.options import DefaultPrompt, output_width, resolve_options
from embert.engine.tasks import NO_TASK, task_names
from embert.server.config import ModelConfig, ServeConfig, option_name
from embert.server.config.options import MAX_RESPONSE_TOKENS, MAX_RESPONSE_WEIGHTS
from embert.server.engine_client.router import Router
from embert.server.http.errors import Invalid, PayloadTooLarge, TaskMissing
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.control import ModelInfo
from embert.server.observability.http_metrics import HttpMetrics
from embert.server.registry.inputs import InputTokenizer, TokenizerPool

__all__ = ["ANY_NAMES", "BYTES_A_WEIGHT", "TEI_NAME", "Capability", "ModelHandle", "ServedModel"]


# What an answer in JSON takes, with the float32 that it is written from.
_BYTES_A_NUMBER = 16
BYTES_A_WEIGHT = 48  # of a sparse vector, or a label's score without the label
_BYTES_AN_ENTITY = 128
TEI_NAME = "text-embeddings-inference"  # what its users write into `model` for any model: no model's own name
ANY_NAMES = frozenset((TEI_NAME, "default/not-specified"))  # and Infinity's, where its user names none


class ModelHandle:
    """One per model and HTTP process; ModelRegistry has what they share."""

    def __init__(
        self,
        config: ModelConfig,
        model: Model,
        tokenizer: Tokenizer,
        router: Router,
        metrics: HttpMetrics,
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
        if model.max_input_length > PLAIN_TOKENS:
            self.admission.counts = TokenCounts(model.config)
        self.metrics = metrics
        self.most_ids = config.max_client_batch_size * model.max_input_length
        self.tokenizer_pool = pool
        self.input_tokenizer = InputTokenizer(tokenizer, pool)
        self.low_priority = config.low_priority  # whether its requests give way to others unless they say otherwise

    @property
    def engine(self) -> ModelInfo | None:
        """What the model is on the engines, once one has it."""
        return self.router.infos[self.number]

    @property
    def state(self) -> str:
        """`ready`, `loading` (again, too), or `failed`."""
        if self.router.connected(self.number):
            return "ready"
        return "failed" if self.admission.failed else "loading"

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
    def token_labels(self) -> int:
        """How many scores a token has; 0 without a head that classifies tokens."""
        classifier = self.model.heads.token_classifier
        return 0 if classifier is None else len(classifier.labels)

    @cached_property
    def _embed_bytes(self) -> int:
        return self.model.width * _BYTES_A_NUMBER

    @cached_property
    def _row_bytes(self) -> dict[Task, int]:
        """Of the other tasks, but sparse vectors, whose size is known only afterwards."""
        classifier, multi = self.model.heads.classifier, self.model.heads.multi_vector
        labels = () if classifier is None else classifier.labels
        return {
            Task.TOKENS: self.model.config.hidden_size * _BYTES_A_NUMBER,
            Task.CLASSIFY: sum(BYTES_A_WEIGHT + len(label.encode()) for label in labels),
            Task.MULTI: 0 if multi is None else multi.layers[-1].outputs * _BYTES_A_NUMBER,
            Task.TOKEN_CLASSES: _BYTES_AN_ENTITY + self.token_labels * _BYTES_A_NUMBER,
        }

    def response_bytes(self, encoded: Encoded, tasks: Task, dimensions: int = 0) -> int:
        """About the bytes of an answer in JSON, with the numbers that it is written from; without sparse vectors."""
        if tasks == Task.EMBED:
            return encoded.sequences * (dimensions * _BYTES_A_NUMBER or self._embed_bytes)
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
            raise Invalid(f"must be {either}at least {least}", param, value=str(limit))
        return limit

    def check_progress(self, request: RequestOptions, check: Callable[[int], None], tokens: int) -> None:
        """For TokenizerPool.run: `check` the tokens so far; raises Unavailable once the request is out of time."""
        check(tokens)
        self.admission.check_time(request)


# --- as requests name it ---


@dataclass(frozen=True, slots=True)
class Capability:
    """What a model must be able to do to answer a route, or one request of it."""

    needs: Task = NO_TASK  # all of these
    needs_one: Task = NO_TASK  # and at least one of these, if there are any
    reranks: bool = False  # and have one label
    entails: bool = False  # and have a label of entailment, for zero-shot classes

    def suits(self, model: Model) -> bool:
        """Whether the model can."""
        classifier = model.heads.classifier
        reranks = classifier is not None and len(classifier.labels) == 1
        entails = classifier is not None and classifier.entailment is not None
        has = model.tasks
        has_tasks = not self.needs & ~has and bool(self.needs_one & has or not self.needs_one)
        return has_tasks and reranks >= self.reranks and entails >= self.entails


class ServedModel:
    """A model, with its server options."""

    def __init__(self, config: ServeConfig, model: Model) -> None:
        self._model = model
        self.name = config.served_name(model.model_id)
        self.others: Sequence[ServedModel] = ()  # of the same server
        self._default = DefaultPrompt.of(model, config.default_prompt, config.default_prompt_name)
        self.default_prompt = self._default.text

    # --- names ---

    def is_named(self, name: str | None) -> bool:
        """Whether it is a name of this model."""
        return name in (self.name, self._model.model_id)

    def suits(self, capability: Capability) -> bool:
        """Whether the model can do all that."""
        return capability.suits(self._model)

    # --- tasks ---

    @cached_property
    def _tasks(self) -> int:
        return int(self._model.tasks)

    @property
    def classifier(self) -> Classifier:
        """The classification head. Raises TaskMissing where the model has none."""
        self.check_tasks(Task.CLASSIFY)
        classifier = self._model.heads.classifier
        assert classifier is not None  # noqa: S101 - the task is made of it
        return classifier

    @property
    def token_classifier(self) -> TokenClassifier:
        """The head that classifies tokens. Raises TaskMissing where the model has none."""
        self.check_tasks(Task.TOKEN_CLASSES)
        classifier = self._model.heads.token_classifier
        assert classifier is not None  # noqa: S101 - the task is made of it
        return classifier

    @property
    def task_names(self) -> list[str]:
        """The model's tasks, for people."""
        return self._model.task_names

    def check_tasks(self, needed: Task, *, reranks: bool = False, entails: bool = False) -> None:
        """Raise TaskMissing where the model does not have all these tasks.

        It may also be asked to rerank, or for a label of entailment.
        """
        if not reranks and not entails and not int(needed) & ~self._tasks:
            return
        has = self.task_names
        missing = [name for name in task_names(needed) if name not in has]
        if reranks and "rerank" not in has:
            missing = ["rerank"]
        if entails and "zero_shot" not in has:
            missing = ["zero_shot"]
        if missing:
            word = f"task{'s' * (len(missing) > 1)} {', '.join(missing)}"
            labels = len(self.classifier.labels) if reranks and Task.CLASSIFY in self._model.tasks else 1
            why = f", which needs a model of one label and not of {labels}" if labels > 1 else ""
            if entails:
                why = ", which needs a classifier with a label that begins with entail"
            raise TaskMissing(
                f"{self.name} does not have the {word}{why}; it has {', '.join(has)}"
                f"{self.elsewhere(Capability(needed, reranks=reranks, entails=entails))}"
            )

    def elsewhere(self, capability: Capability) -> str:
        """The end of a sentence about what this model cannot do: which other models of the server can."""
        if not self.others:
            return ""
        able = [other.name for other in self.others if other.suits(capability)]
        return f"; name {' or '.join(able)} for it" if able else ", and no other model here can do it"

    def check_dimensions(self, dimensions: int | None, param: str = "dimensions") -> int:
        """`dimensions` for the engine, where 0 means all. Raises InputError outside 1 … width."""
        if dimensions is None:
            return 0
        width = output_width(self._model, dimensions, param)
        return 0 if width == self._model.width else width

    def resolve_options(
        self, task: str | None = None, prompt_name: str | None = None, is_query: bool | None = None
    ) -> tuple[str, int]:
        """Returns the prompt and the adapter of a request, by the rules of the engine and the server's default."""
        return resolve_options(self._model, task, prompt_name, is_query, self._default)

    def is_query(self, input_type: str | None, tasks: Task) -> bool | None:
        """Whether texts are queries, by a field of the request; None where it makes no difference or is not said."""
        if Task.MULTI in tasks or (input_type is not None and self._model.config.adapters is not None):
            return input_type == "query"
        return None


# --- limits ---


class RequestLimits:
    """The limits of the server's options. Each check raises PayloadTooLarge, naming the field `param` and the option.

    With `more`, not everything is counted yet.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config

    def check_count(self, count: int, param: str) -> None:
        """The texts of a request."""
        if count > self._config.max_client_batch_size:
            raise self._exceeded("max_client_batch_size", f"has {count} texts", param)

    def check_documents(self, count: int, param: str) -> None:
        """The documents or pairs of a request."""
        if count > self._config.max_client_documents:
            raise self._exceeded("max_client_documents", f"has {count} texts", param)

    def check_label_pairs(self, texts: int, labels: int, param: str) -> None:
        """The pairs of each text with each label."""
        if texts * labels > self._config.max_client_documents:
            reason = f"makes {texts * labels} pairs, of {labels} labels and {texts} texts"
            raise self._exceeded("max_client_documents", reason, param)

    def check_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of a request."""
        limit = self._config.max_client_batch_tokens
        if limit is not None and tokens > limit:
            raise self._exceeded("max_client_batch_tokens", f"has {_number(tokens, more=more)} tokens", param)

    def check_pair_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of pairs, whose texts may be in several: no more than a body may have bytes."""
        self.check_tokens(tokens, param, more=more)
        if tokens > self._config.payload_limit:
            raise self._exceeded("payload_limit", f"makes pairs of {_number(tokens, more=more)} tokens", param)

    def check_response_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens that an answer of /tokenize or /decode is about."""
        self.check_tokens(tokens, param, more=more)
        if tokens > MAX_RESPONSE_TOKENS:
            raise PayloadTooLarge(f"has {_number(tokens, more=more)} tokens", param, limit=MAX_RESPONSE_TOKENS)

    def check_weights(self, weights: int, param: str) -> None:
        """The weights of a response's sparse vectors, counted while they come, and its scores of labels."""
        if weights > MAX_RESPONSE_WEIGHTS:
            reason = f"has a response of at least {weights} weights or scores"
            raise PayloadTooLarge(reason, param, limit=MAX_RESPONSE_WEIGHTS)

    def _exceeded(self, option: str, reason: str, param: str) -> PayloadTooLarge:
        return PayloadTooLarge(reason, param, limit=getattr(self._config, option), option=option_name(option))


def _number(number: int, *, more: bool) -> str:
    return f"at least {number}" if more else str(number)
