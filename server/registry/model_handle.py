"""One model of an HTTP process: its name, tasks and prompts, its tokenizer, its limits, and the errors about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from embert.engine import Encoded, Model, Task, Tokenizer
from embert.engine.heads.description import MARKED_OPTIONS, Classifier, TokenClassifier
from embert.engine.models.flops import PLAIN_TOKENS, TokenCounts
from embert.engine.options import DefaultPrompt, missing_tasks, output_width, resolve_limit, resolve_options
from embert.engine.tasks import NO_TASK
from embert.server.config import ModelConfig, ServeConfig, option_name
from embert.server.config.options import MAX_RESPONSE_TOKENS, MAX_RESPONSE_WEIGHTS
from embert.server.engine_client.router import Router
from embert.server.http.errors import PayloadTooLarge, TaskMissing
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.control import ModelInfo
from embert.server.observability.http_metrics import HttpMetrics
from embert.server.registry.tokenizing import InputTokenizer, TokenizerPool

_BYTES_A_NUMBER = 16  # of a response in JSON, with the float32 that it is written from
BYTES_A_WEIGHT = 48  # of a sparse vector, or a label's score without the label
_BYTES_AN_ENTITY = 128
# Names that stand for any model: users of TEI write the first, and Infinity's client sends the second by default.
ANY_NAMES = frozenset(("text-embeddings-inference", "default/not-specified"))


class ModelHandle:
    """One model in one HTTP process. ModelRegistry has what the models share."""

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
        """`number` identifies the model in messages between processes."""
        self.config = config
        self.number = number
        self.model = model
        self.name = config.served_name(model.model_id)
        self.others: Sequence[ModelHandle] = ()  # of the same server
        self._checked: set[Capability] = set()  # that the model has
        self._default = DefaultPrompt.of(model, config.default_prompt, config.default_prompt_name)
        self.default_prompt = self._default.text
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
        self.low_priority = config.low_priority  # the priority of requests without X-Priority

    @property
    def engine(self) -> ModelInfo | None:
        """Description by the engine that loaded the model last, or None before the first has."""
        return self.router.infos[self.number]

    @property
    def state(self) -> str:
        """`ready`, `loading` (also after a crash), or `failed`."""
        if self.router.connected(self.number):
            return "ready"
        return "failed" if self.admission.failed else "loading"

    @property
    def compute_type(self) -> bytes:
        """Value of the header `x-compute-type`: `cpu`, or `gpu+NVIDIA H100`."""
        engine = self.engine
        if engine is None or engine.device == "cpu":
            return b"cpu"
        return f"gpu+{engine.device_name}".encode("latin-1", "replace")

    @property
    def token_vector_limit(self) -> int:
        """Limit of tokens for a request that gets a vector for each token: one batch, since the vectors are large."""
        engine = self.engine
        return engine.max_batch_tokens if engine is not None else self.model.max_input_length

    @cached_property
    def labels(self) -> int:
        """Number of scores of a text; 0 without a classification head."""
        classifier = self.model.heads.classifier
        return 0 if classifier is None else len(classifier.labels)

    @cached_property
    def token_labels(self) -> int:
        """Number of scores of a token; 0 without a head that classifies tokens."""
        classifier = self.model.heads.token_classifier
        return 0 if classifier is None else len(classifier.labels)

    @cached_property
    def _embed_bytes(self) -> int:
        return self.model.width * _BYTES_A_NUMBER

    @cached_property
    def _row_bytes(self) -> dict[int, int]:
        """Bytes of a text or token by task; those of sparse vectors are known only afterwards."""
        classifier, multi = self.model.heads.classifier, self.model.heads.multi_vector
        decider = self.model.heads.decider
        labels = () if classifier is None else classifier.labels
        return {  # ints: an operation on two tasks takes a microsecond
            int(Task.TOKENS): self.model.config.hidden_size * _BYTES_A_NUMBER,
            int(Task.CLASSIFY): sum(BYTES_A_WEIGHT + len(label.encode()) for label in labels),
            int(Task.MULTI): 0 if multi is None else multi.layers[-1].outputs * _BYTES_A_NUMBER,
            int(Task.TOKEN_CLASSES): _BYTES_AN_ENTITY + self.token_labels * _BYTES_A_NUMBER,
            int(Task.DECIDE): 0 if decider is None else MARKED_OPTIONS * _BYTES_A_NUMBER,
        }

    def response_bytes(self, encoded: Encoded, tasks: Task, dimensions: int = 0) -> int:
        """Estimated bytes of a response in JSON and the numbers that it is written from, without sparse vectors."""
        if tasks == Task.EMBED:
            return encoded.sequences * (dimensions * _BYTES_A_NUMBER or self._embed_bytes)
        size = encoded.sequences * self._embed_bytes if tasks & Task.EMBED else 0
        wanted = int(tasks)
        for task, row_bytes in self._row_bytes.items():
            if task & wanted:
                one_each = task in (Task.CLASSIFY, Task.DECIDE)
                size += (encoded.sequences if one_each else encoded.tokens) * row_bytes
        return size

    def check_open(self) -> None:
        """Raises Unavailable while the server shuts down."""
        if self.admission.draining:
            self.admission.check_ready()

    def check_limit(
        self, limit: int | None, *, is_query: bool | None = None, param: str = "truncate_prompt_tokens"
    ) -> int | None:
        """Returns the limit of a text's tokens; None and -1 mean the model's. Raises InputError if it is too low."""
        others = "-1 or " if param == "truncate_prompt_tokens" else ""
        return resolve_limit(self.tokenizer, None if limit == -1 else limit, is_query, param, others)

    def check_progress(self, request: RequestOptions, check: Callable[[int], None], tokens: int) -> None:
        """Calls `check` with the tokens so far. Raises Unavailable once the request is out of time."""
        check(tokens)
        self.admission.check_time(request)

    # --- tasks, names and options of requests ---

    def is_named(self, name: str | None) -> bool:
        """True if `name` is the served name or the id of this model."""
        return name in (self.name, self.model.model_id)

    def suits(self, capability: Capability) -> bool:
        return capability.suits(self.model)

    @cached_property
    def _tasks(self) -> int:
        return int(self.model.tasks)

    @property
    def classifier(self) -> Classifier:
        """The classification head. Raises TaskMissing if the model has none."""
        self.check_tasks(Task.CLASSIFY)
        return cast("Classifier", self.model.heads.classifier)

    @property
    def scorer(self) -> Classifier | None:
        """The classification head of one label; None for late interaction. Raises TaskMissing if it has neither."""
        self.check(Capability(reranks=True))
        return self.model.heads.classifier

    @property
    def token_classifier(self) -> TokenClassifier:
        """The head that classifies tokens. Raises TaskMissing if the model has none."""
        self.check_tasks(Task.TOKEN_CLASSES)
        return cast("TokenClassifier", self.model.heads.token_classifier)

    @property
    def task_names(self) -> list[str]:
        return self.model.task_names

    def check_tasks(self, needed: Task) -> None:
        """Raises TaskMissing unless the model has all these tasks."""
        if int(needed) & ~self._tasks:
            self.check(Capability(needed))

    def check(self, capability: Capability) -> None:
        """Raises TaskMissing unless the model has what the capability needs for every request."""
        if capability in self._checked:
            return
        missing = capability.missing(self.model)
        if not missing:
            self._checked.add(capability)
            return
        word = f"task{'s' * (len(missing) > 1)} {', '.join(missing)}"
        labels = len(self.classifier.labels) if capability.reranks and Task.CLASSIFY in self.model.tasks else 1
        why = f", which needs a model of one label and not of {labels}" if labels > 1 else ""
        if capability.entails or capability.decides:
            other = ", or a model that decides" if capability.decides else ""
            why = f", which needs a classifier with a label that begins with entail{other}"
        raise TaskMissing(
            f"{self.name} does not have the {word}{why}; it has {', '.join(self.task_names)}"
            f"{self.elsewhere(dataclasses.replace(capability, needs_one=NO_TASK))}",
            is_general=capability.decides,
        )

    def elsewhere(self, capability: Capability) -> str:
        """Returns the end of a sentence about what this model lacks: the names of other models that have it."""
        if not self.others:
            return ""
        able = [other.name for other in self.others if other.suits(capability)]
        return f"; name {' or '.join(able)} for it" if able else ", and no other model here can do it"

    def check_dimensions(self, dimensions: int | None, param: str = "dimensions") -> int:
        """Returns `dimensions` for the engine, where 0 means all. Raises InputError outside 1 … width."""
        if dimensions is None:
            return 0
        width = output_width(self.model, dimensions, param)
        return 0 if width == self.model.width else width

    def resolve_options(
        self,
        task: str | None = None,
        prompt_name: str | None = None,
        is_query: bool | None = None,
        instruction: str | None = None,
    ) -> tuple[str, int]:
        """Returns the prompt and the adapter of a request, by the rules of the engine and the server's default."""
        return resolve_options(self.model, task, prompt_name, is_query, self._default, instruction)

    def is_query(self, input_type: str | None, tasks: Task) -> bool | None:
        """Returns whether `input_type` stands for queries; None if it makes no difference or is not given."""
        if Task.MULTI in tasks or (input_type is not None and self.model.config.adapters is not None):
            return input_type == "query"
        return None


@dataclass(frozen=True, slots=True)
class Capability:
    """Requirements of a route, or of one of its requests, for a model."""

    needs: Task = NO_TASK  # all of these
    needs_one: Task = NO_TASK  # and at least one of these, if there are any
    reranks: bool = False  # and one label, or late interaction
    entails: bool = False  # and a label of entailment, for zero-shot classes
    decides: bool = False  # and probabilities for the options of questions

    def suits(self, model: Model) -> bool:
        return (bool(self.needs_one & model.tasks) or not self.needs_one) and not self.missing(model)

    def missing(self, model: Model) -> list[str]:
        """Names of what the model lacks for every request."""
        return missing_tasks(model, self.needs, reranks=self.reranks, entails=self.entails, decides=self.decides)


# --- limits ---


class RequestLimits:
    """Limits of the server's options. Each check raises PayloadTooLarge, which names the field `param` and the option.

    `more` is true while not everything is counted yet.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config

    def check_count(self, count: int, param: str) -> None:
        if count > self._config.max_client_batch_size:
            raise self._exceeded("max_client_batch_size", f"has {count} texts", param)

    def check_documents(self, count: int, param: str) -> None:
        if count > self._config.max_client_documents:
            raise self._exceeded("max_client_documents", f"has {count} texts", param)

    def check_label_pairs(self, texts: int, labels: int, param: str) -> None:
        """Checks the number of pairs of each text with each label."""
        if texts * labels > self._config.max_client_documents:
            reason = f"makes {texts * labels} pairs, of {labels} labels and {texts} texts"
            raise self._exceeded("max_client_documents", reason, param)

    def check_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        limit = self._config.max_client_batch_tokens
        if limit is not None and tokens > limit:
            raise self._exceeded("max_client_batch_tokens", f"has {_number(tokens, more=more)} tokens", param)

    def check_pair_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """Checks the tokens of pairs. A text may be in many of them: they are limited to the bytes of a body."""
        self.check_tokens(tokens, param, more=more)
        if tokens > self._config.payload_limit:
            raise self._exceeded("payload_limit", f"makes pairs of {_number(tokens, more=more)} tokens", param)

    def check_response_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """Checks the tokens that a response of /tokenize or /decode lists."""
        self.check_tokens(tokens, param, more=more)
        if tokens > MAX_RESPONSE_TOKENS:
            raise PayloadTooLarge(f"has {_number(tokens, more=more)} tokens", param, limit=MAX_RESPONSE_TOKENS)

    def check_weights(self, weights: int, param: str) -> None:
        """Checks the weights of sparse vectors, counted while they come, or the scores of labels, of a response."""
        if weights > MAX_RESPONSE_WEIGHTS:
            reason = f"has a response of at least {weights} weights or scores"
            raise PayloadTooLarge(reason, param, limit=MAX_RESPONSE_WEIGHTS)

    def _exceeded(self, option: str, reason: str, param: str) -> PayloadTooLarge:
        return PayloadTooLarge(reason, param, limit=getattr(self._config, option), option=option_name(option))


def _number(number: int, *, more: bool) -> str:
    return f"at least {number}" if more else str(number)
