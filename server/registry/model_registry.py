"""The models of an HTTP process: the state that they share, their loading, and the choice of one for a request."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence

from embert.engine import Tokenizer, load_model
from embert.engine.errors import EngineError
from embert.engine.tasks import NO_TASK
from embert.engine.tokenization.tokenizer import UNBROKEN_CHARACTERS
from embert.server.config import ServeConfig
from embert.server.engine_client.router import Router
from embert.server.http.errors import ModelUnknown, Unavailable, describe_name
from embert.server.http.held_bytes import BodyReader, HeldBytes
from embert.server.ipc.control import ControlConnection, ModelFailed, Progress, StartHttp
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.observability.http_metrics import HttpMetrics
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.scraping import Scrapes
from embert.server.registry.model_handle import ANY_NAMES, Capability, ModelHandle
from embert.server.registry.tokenizing import TokenizerPool
from embert.server.request.turns import Turns

log = logging.getLogger(__name__)


class ModelRegistry:
    """The models of one HTTP process, and the state that they share."""

    def __init__(
        self,
        config: ServeConfig,
        handles: Sequence[ModelHandle],
        router: Router,
        metrics: HttpMetrics,
        memory: MetricMemory,
        pool: TokenizerPool,
        broken: Mapping[str, str] | None = None,
    ) -> None:
        """`handles` are the models, at least one, in the order of the options. `broken` has reasons by failed model."""
        self.config = config
        self.broken = broken or {}
        self.all = tuple(handles)
        self.first = self.all[0]
        self.several = len(self.all) + len(self.broken) > 1
        self.router = router
        self.metrics = metrics
        self.scrapes = Scrapes(memory, self.write_metrics)
        self.held = HeldBytes(config.held_limit)
        self.bodies = BodyReader(config.payload_limit, self.held, config.client_timeout)
        self.turns = Turns()
        self.low_priority_turns = Turns()
        self.most_ids = max(handle.most_ids for handle in self.all)
        self._pool = pool
        self.by_name: dict[str, ModelHandle] = {}  # by served name and by model id; served names take precedence
        for handle in self.all:
            self.by_name[handle.name] = handle
            handle.others = [other for other in self.all if other is not handle]
        for handle in self.all:
            self.by_name.setdefault(handle.model.model_id, handle)

    # --- the choice of a model ---

    @property
    def names(self) -> list[str]:
        """Served names in the order of the models, without failed ones."""
        return [handle.name for handle in self.all]

    def check_broken(self, name: str) -> None:
        """Raises Unavailable for the name of a failed model."""
        if name in self.broken:
            raise Unavailable(f"{name} has failed ({self.broken[name]})")

    def is_any(self, name: str) -> bool:
        """True if the name stands for any model. A model with that name takes precedence."""
        return name in ANY_NAMES or "any-model" in self.config.openai_accepts

    def unknown(self, name: str, param: str | None = "model", what: str = "") -> ModelUnknown:
        """Returns the error for an unknown name in the field `param`, or in `what`."""
        names = self.names
        known = f"one of {', '.join(names)}" if self.several else names[0]
        reason = f"must be {known}" if param else f"{what} must be {known}"
        return ModelUnknown(reason, param, value=describe_name(name))

    def in_path(self, name: str) -> ModelHandle:
        """Returns the model with this name or id. Raises ModelUnknown, or Unavailable for a failed model."""
        handle = self.by_name.get(name)
        if handle is None:
            self.check_broken(name)
            raise self.unknown(name, None, "the model in the path")
        return handle

    def able(self, capability: Capability) -> ModelHandle:
        """Returns the first model with this capability, or the first of all if none has it."""
        return next((handle for handle in self.all if handle.suits(capability)), self.first)

    def most(self, option: str) -> int:
        """Returns the largest value of a limit that each model may set."""
        return max(int(getattr(handle.config, option)) for handle in self.all)

    # --- the process ---

    def write_metrics(self) -> None:
        self.metrics.held.set(self.held.total)
        for handle in self.all:
            self.metrics.admitted[handle.name].set(handle.admission.admitted_tokens)
            self.metrics.queue_limit[handle.name].set(handle.admission.queue_limit)
        self.metrics.write()

    def close(self) -> None:
        self.scrapes.close()
        self._pool.close()


def load_registry(
    start: StartHttp,
    control: ControlConnection,
    counters: SharedCounters,
    memory: MetricMemory,
    *,
    routes: Sequence[str],
    tasks: Collection[str],
) -> ModelRegistry:
    """Loads the models that the supervisor lists. Raises EngineError if none can be loaded.

    If one of several fails, `control` tells the supervisor and the others are served. `routes` and `tasks` are labels
    of metrics.
    """
    config = start.config
    router = Router(start.models, counters, start.http_index)
    metrics = HttpMetrics(
        routes,
        tasks=tasks,
        models=[model.name for model in start.models],
        engines=len(start.engines),
    )
    pool = TokenizerPool(config.tokenization_threads, config.payload_limit)
    handles, broken = [], dict(start.broken)
    for entry in start.models:
        if entry.name in broken:
            continue
        control.send(Progress("reading the tokenizer", entry.number))
        try:
            model = load_model(entry.folder, pooling=entry.config.pooling, model_id=entry.model_id)
            config = entry.config
            tokenizer = Tokenizer(model, truncate=config.auto_truncate, most_unbroken=UNBROKEN_CHARACTERS)
            handles.append(ModelHandle(config, model, tokenizer, router, metrics, pool, entry.number))
        except Exception as error:  # a broken model must not stop the others
            reason = str(error)
            if not isinstance(error, EngineError):
                log.debug("reading a model failed", exc_info=True)
                reason = f"{entry.model_id} cannot be served: {type(error).__name__}: {error}"
            if len(start.models) == 1:
                raise EngineError(reason) from error
            log.error("%s", reason)  # noqa: TRY400 - users need the sentence, not the traceback
            broken[entry.name] = reason
            control.send(ModelFailed(entry.number, reason))
    if not handles:
        raise EngineError("; ".join(broken.values()))
    return ModelRegistry(config, handles, router, metrics, memory, pool, broken)


class ModelSelector:
    """Selects the model for each request of one route."""

    __slots__ = ("_by_capability", "by_body", "capability", "default", "is_open", "path_model", "registry")

    def __init__(
        self,
        registry: ModelRegistry,
        capability: Capability,
        default: ModelHandle | None = None,
        path_model: str | None = None,
        *,
        has_field: bool = False,
    ) -> None:
        """`default` serves requests without a name; None stands for the first model with the `capability`.

        `path_model` is the name of `default` in the path, if the path has one; then only `default` serves requests.
        `has_field` is true if the body of a request may name a model.
        """
        self.registry = registry
        self.default = default or registry.able(capability)
        self.path_model = path_model
        self.is_open = registry.several and path_model is None  # another model than the default may serve a request
        self.by_body = self.is_open and has_field  # the body selects the model
        self.capability = capability
        self._by_capability: dict[Capability, ModelHandle] = {}

    @property
    def can(self) -> bool:
        """True if the default model supports this route."""
        capability = self.capability
        return self.default.suits(dataclasses.replace(capability, needs_one=NO_TASK))

    def find(self, names: tuple[str | None, ...], capability: Capability | None = None) -> ModelHandle:
        """Returns the model that all `names` refer to. Without a name, it is the first with the request's `capability`.

        An empty name counts as absent: clients that must send one leave it blank.

        Raises ModelUnknown for a name that no model has and for names of two models, Unavailable for a failed model,
        and TaskMissing for one that lacks a capability of the route.
        """
        registry = self.registry
        choice = None if self.path_model is None else self.default
        for name in names:
            if not name:
                continue
            known = registry.by_name.get(name)
            if known is None:
                registry.check_broken(name)
                if not registry.is_any(name):
                    raise (
                        registry.unknown(name) if choice is None or not registry.several else self._other(choice, name)
                    )
            elif choice is None:
                choice = known
            elif known is not choice:
                raise self._other(choice, name)
        if choice is None:
            return self._able(capability) if self.is_open and capability is not None else self.default
        if choice is not self.default:
            choice.check(self.capability)
        return choice

    def _other(self, choice: ModelHandle, name: str) -> ModelUnknown:
        reason = f"must be {choice.name}, which the path names"
        return ModelUnknown(reason, "model", value=describe_name(name))

    def _able(self, capability: Capability) -> ModelHandle:
        """Returns the first model with the capability, or the route's default."""
        if capability not in self._by_capability:
            able = (handle for handle in (self.default, *self.registry.all) if handle.suits(capability))
            self._by_capability[capability] = next(able, self.default)
        return self._by_capability[capability]
