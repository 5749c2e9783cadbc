"""A served model as requests name it: its name, its tasks, its prompts, and the errors about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from embert.engine import Model, Task
from embert.engine.heads.description import Classifier
from embert.engine.tasks import NO_TASK, task_names
from embert.server.config import ServeConfig
from embert.server.http.errors import Invalid, TaskMissing, describe_name

__all__ = ["ANY_NAMES", "TEI_NAME", "Capability", "ServedModel"]

ROLES = {True: "retrieval.query", False: "retrieval.passage"}  # adapters of queries and of documents, in jina's words
TEI_NAME = "text-embeddings-inference"  # what its users write into `model` for any model: no model's own name
ANY_NAMES = frozenset((TEI_NAME, "default/not-specified"))  # and Infinity's, where its user names none


@dataclass(frozen=True, slots=True)
class Capability:
    """What a model must be able to do to answer a route, or one request of it."""

    needs: Task = NO_TASK  # all of these
    needs_one: Task = NO_TASK  # and at least one of these, if there are any
    reranks: bool = False  # and have one label

    def suits(self, model: Model) -> bool:
        """Whether the model can."""
        classifier = model.heads.classifier
        reranks = classifier is not None and len(classifier.labels) == 1
        has = model.tasks
        return not self.needs & ~has and bool(self.needs_one & has or not self.needs_one) and reranks >= self.reranks


class ServedModel:
    """A model, with its server options."""

    def __init__(self, config: ServeConfig, model: Model) -> None:
        self._config, self._model = config, model
        self.name = config.served_name(model.model_id)
        self.others: Sequence[ServedModel] = ()  # of the same server
        # Of texts whose request chooses none. The name is that of an adapter, too, where there is one of this name.
        self._default_name = (
            None if config.default_prompt is not None else (config.default_prompt_name or model.default_prompt_name)
        )
        self.default_prompt = config.default_prompt or ""
        if self._default_name is not None:
            self.default_prompt = model.prompts[self._default_name]

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
    def task_names(self) -> list[str]:
        """The model's tasks; a classifier of one label also reranks."""
        classifier = self._model.heads.classifier
        return task_names(self._model.tasks) + ["rerank"] * (classifier is not None and len(classifier.labels) == 1)

    def check_tasks(self, needed: Task, *, reranks: bool = False) -> None:
        """Raise TaskMissing where the model does not have all these tasks, or is to rerank and cannot."""
        if not reranks and not int(needed) & ~self._tasks:
            return
        has = self.task_names
        missing = [name for name in task_names(needed) if name not in has]
        if reranks and "rerank" not in has:
            missing = ["rerank"]
        if missing:
            word = f"task{'s' * (len(missing) > 1)} {', '.join(missing)}"
            labels = len(self.classifier.labels) if reranks and Task.CLASSIFY in self._model.tasks else 1
            why = f", which needs a model of one label and not of {labels}" if labels > 1 else ""
            raise TaskMissing(
                f"{self.name} does not have the {word}{why}; it has {', '.join(has)}"
                f"{self.elsewhere(Capability(needed, reranks=reranks))}"
            )

    def elsewhere(self, capability: Capability) -> str:
        """The end of a sentence about what this model cannot do: which other models of the server can."""
        if not self.others:
            return ""
        able = [other.name for other in self.others if other.suits(capability)]
        return f"; name {' or '.join(able)} for it" if able else ", and no other model here can do it"

    def check_dimensions(self, dimensions: int | None, param: str = "dimensions") -> int:
        """`dimensions` for the engine, where 0 means all. Raises Invalid outside 1 … width."""
        if dimensions is None:
            return 0
        width = self._model.width
        if not 1 <= dimensions <= width:
            raise Invalid(f"`{param}` must be 1 to {width}; it is {dimensions}", param)
        return 0 if dimensions == width else dimensions

    # --- prompts and adapters ---

    def prompt(self, name: str | None, *, is_query: bool | None = None) -> str:
        """The text of a prompt; without a name, that of queries or of documents (None: neither), or the default one.

        Raises Invalid for a name that the model does not have.
        """
        prompts = self._model.prompts
        if name is None:
            head = self._model.heads.multi_vector
            chosen = self._config.default_prompt is not None or self._config.default_prompt_name is not None
            if is_query is None or head is None or chosen:
                return self.default_prompt
            return head.role(is_query).prompt
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise Invalid(
                f"`prompt_name` must be one of the model's prompts ({known}); it is {describe_name(name)}",
                "prompt_name",
            )
        return prompts[name]

    def chosen(
        self, task: str | None, prompt_name: str | None, *, is_query: bool | None = None
    ) -> tuple[str | None, int]:
        """What a request chooses: the name of a prompt, None where it names none, and the number of an adapter or -1.

        The adapter is that of the task, else of the prompt's name, else that of queries or of documents (None:
        neither), else of the default prompt's name. Raises Invalid for a task that the model does not have.
        """
        adapters = self._model.config.adapters
        if adapters is None:
            if task is not None:
                raise Invalid(f"`task` is for models with adapters, and {self.name} has none", "task")
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
        if Task.MULTI in tasks or (input_type is not None and self._model.config.adapters is not None):
            return input_type == "query"
        return None
