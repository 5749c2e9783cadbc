"""The models of an API process together: what they share, and who is meant by a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embert.server.config import ConfigError, ServeConfig
from embert.server.engine_client.router import Router
from embert.server.frontend.input.large_bodies import CooperativeSteps
from embert.server.frontend.input.request_body import describe_name
from embert.server.frontend.input.tokenizer_pool import TokenizerPool
from embert.server.frontend.low_priority_throttle import LowPriorityThrottle
from embert.server.frontend.models.model_handle import ModelHandle
from embert.server.frontend.models.served_model import ANY_NAMES, Capability
from embert.server.http.errors import ModelUnknown, Unavailable
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.timeouts import BodyReader
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.scraping.scrapes import Scrapes

__all__ = ["ModelRegistry"]


class ModelRegistry:
    """One per API process."""

    def __init__(
        self,
        config: ServeConfig,
        services: Sequence[ModelHandle],
        router: Router,
        metrics: ApiMetrics,
        memory: MetricMemory,
        pool: TokenizerPool,
        broken: Mapping[str, str] | None = None,
    ) -> None:
        """`services` are of the server's models, in their order, at least one.

        `broken`: the names of others that cannot be served, each with the reason. Raises ConfigError for equal names.
        """
        self.config = config
        self.broken = broken or {}
        self.all = tuple(services)
        self.first = self.all[0]
        self.several = len(self.all) + len(self.broken) > 1
        self.router = router
        self.metrics = metrics
        self.scrapes = Scrapes(memory, self.write_metrics)
        self.held = HeldBytes(config.held_limit)
        self.bodies = BodyReader(config.payload_limit, self.held, config.client_timeout)
        self.parse_steps = CooperativeSteps()
        self.bulk_turns = LowPriorityThrottle()
        self.most_ids = max(service.most_ids for service in self.all)
        self._pool = pool
        self.by_name: dict[str, ModelHandle] = {}  # by served name and by model id, of which the former go first
        for service in self.all:
            if service.served.name in self.by_name:
                raise ConfigError(
                    f"2 models are named {service.served.name!r}; give each a name of its own, as in NAME=MODEL"
                )
            self.by_name[service.served.name] = service
            service.served.others = [other.served for other in self.all if other is not service]
        for service in self.all:
            self.by_name.setdefault(service.model.model_id, service)

    # --- which model ---

    @property
    def names(self) -> list[str]:
        """The served names, in the models' order; those of broken ones are not among them."""
        return [service.served.name for service in self.all]

    def check_broken(self, name: str) -> None:
        """Raise Unavailable for the name of a model that cannot be served."""
        if name in self.broken:
            raise Unavailable(f"{name} has failed ({self.broken[name]})", reason="loading")

    def is_any(self, name: str) -> bool:
        """Whether this name stands for whatever model there is, unless it is one's own."""
        return name in ANY_NAMES or self.config.any_model_name

    def unknown(self, name: str, param: str | None = "model", what: str = "`model`") -> ModelUnknown:
        """The answer to a request that names a model which is not here, in the field `param`."""
        names = self.names
        known = f"one of {', '.join(names)}" if self.several else names[0]
        return ModelUnknown(f"{what} must be {known}; it is {describe_name(name)}", param)

    def in_path(self, name: str) -> ModelHandle:
        """The model of this name or id. Raises ModelUnknown, and Unavailable for one that cannot be served."""
        found = self.by_name.get(name)
        if found is None:
            self.check_broken(name)
            raise self.unknown(name, None, "the model in the path")
        return found

    def able(self, wanted: Capability) -> ModelHandle:
        """The first model that can do this; the first of all where none can."""
        return next((service for service in self.all if service.served.suits(wanted)), self.first)

    def most(self, option: str) -> int:
        """The largest value of a limit that models may have for themselves."""
        return max(int(getattr(service.config, option)) for service in self.all)

    # --- the process ---

    def write_metrics(self) -> None:
        """Make everything that happened until now visible to scrapes."""
        self.metrics.held_bytes = self.held.total
        for service in self.all:
            self.metrics.queues[service.served.name] = service.admission.admitted_tokens, service.queue_limit
        self.metrics.write()

    def close(self) -> None:
        """Stop the threads."""
        self.scrapes.close()
        self._pool.close()
