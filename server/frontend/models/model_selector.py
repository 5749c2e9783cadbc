"""Which model answers a request: the one that its path or its body names, else the first that can do what it asks."""

from __future__ import annotations

from embert.server.frontend.input.request_body import describe_name
from embert.server.frontend.models.model_handle import ModelHandle
from embert.server.frontend.models.model_registry import ModelRegistry
from embert.server.frontend.models.served_model import Capability
from embert.server.http.errors import ModelUnknown

__all__ = ["ModelSelector"]


class ModelSelector:
    """Of the requests of one path."""

    __slots__ = ("_by_wanted", "_wanted", "by_body", "default", "is_open", "path_model", "services")

    def __init__(
        self,
        services: ModelRegistry,
        wanted: Capability,
        default: ModelHandle | None = None,
        path_model: str | None = None,
        *,
        has_field: bool = False,
    ) -> None:
        """`wanted` is what the route needs. `default` answers requests that name no model; None: the first that can.

        `path_model`: the name of `default` in the path, where it has one; no other model answers then. `has_field`:
        whether a body may name a model.
        """
        self.services = services
        self.default = default or services.able(wanted)
        self.path_model = path_model
        self.is_open = services.several and path_model is None  # whether another model may answer than the default
        self.by_body = self.is_open and has_field  # whether that depends on the body
        self._wanted = wanted
        self._by_wanted: dict[Capability, ModelHandle] = {}

    @property
    def can(self) -> bool:
        """Whether the default can do what the route needs whatever a request says."""
        return self.default.served.suits(Capability(self._wanted.needs, reranks=self._wanted.reranks))

    def check(self, service: ModelHandle) -> None:
        """Raise TaskMissing where a model cannot do what the route needs."""
        service.served.check_tasks(self._wanted.needs, reranks=self._wanted.reranks)

    def find(self, names: tuple[str | None, ...], wanted: Capability | None = None) -> ModelHandle:
        """The model that a request means by these names; `wanted`: what it asks for, where the route leaves that open.

        Raises ModelUnknown for a name that no model has, and for names of two models; Unavailable for a model that
        cannot be served, TaskMissing for one that cannot do what the route needs.
        """
        services = self.services
        found = None if self.path_model is None else self.default
        for name in names:
            if name is None:
                continue
            known = services.by_name.get(name)
            if known is None:
                services.check_broken(name)
                if not services.is_any(name):
                    raise services.unknown(name) if found is None or not services.several else self._other(found, name)
            elif found is None:
                found = known
            elif known is not found:
                raise self._other(found, name)
        if found is None:
            return self._able(wanted) if self.is_open and wanted is not None else self.default
        if found is not self.default:
            self.check(found)
        return found

    def _other(self, found: ModelHandle, name: str) -> ModelUnknown:
        said = f"`model` must be {found.served.name}, which the path names; it is {describe_name(name)}"
        return ModelUnknown(said, "model")

    def _able(self, wanted: Capability) -> ModelHandle:
        """The first model that can do this, else the route's default."""
        if wanted not in self._by_wanted:
            able = (service for service in (self.default, *self.services.all) if service.served.suits(wanted))
            self._by_wanted[wanted] = next(able, self.default)
        return self._by_wanted[wanted]
