"""Rules for the options of a request: its tasks, prompt, adapter, limit of tokens, and width of vectors.

`Engine`, bulk runs, Ray and the server use the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embert.engine.errors import InputError
from embert.engine.model import Model
from embert.engine.tasks import NO_TASK, Task, task_names
from embert.engine.tokenization.encoded import Encoded, check_text
from embert.engine.tokenization.tokenizer import Tokenizer

PROMPTS = {True: "query", False: "document"}  # of models whose adapters do not name prompts
ROLES = {True: "retrieval.query", False: "retrieval.passage"}  # adapters of queries and of documents, in jina's words
_SHOWN_CHARACTERS = 100  # longer names may be texts, which errors never contain


@dataclass(frozen=True, slots=True)
class DefaultPrompt:
    """Prompt of requests that choose none."""

    text: str = ""
    name: str | None = None  # an adapter of this name is the default, too
    replaces_roles: bool = False  # the prompts of queries and documents of a model for late interaction

    @classmethod
    def of(cls, model: Model, text: str | None = None, name: str | None = None) -> DefaultPrompt:
        """Returns the model's default, unless `text` or the prompt called `name` replaces it."""
        if text is not None:
            return cls(text, None, replaces_roles=True)
        default = name or model.default_prompt_name
        return cls("" if default is None else model.prompts[default], default, replaces_roles=name is not None)


def resolve_options(
    model: Model,
    task: str | None = None,
    prompt_name: str | None = None,
    is_query: bool | None = None,
    default: DefaultPrompt | None = None,
    instruction: str | None = None,
) -> tuple[str, int]:
    """Returns the text of the prompt, and the index of the adapter or -1.

    The prompt is that of `prompt_name`, else of `task`, else that of queries or documents (`is_query`; None: neither),
    else the default. The adapter is that of `task`, else of `prompt_name`, else that of queries or documents, else
    that of the default prompt's name. Where adapters do not name prompts, the two are chosen separately. An
    `instruction` replaces the prompt by that of queries with this instruction. Raises InputError for names that the
    model does not have, and for an instruction that it does not read or that comes with `prompt_name`.
    """
    if default is None:
        default = DefaultPrompt.of(model)
    adapters, adapter, name = model.config.adapters, -1, prompt_name
    if adapters is not None and not adapters.names_prompts:
        task, name = _separate(model, task, prompt_name, is_query)
        task = adapters.default if task is None else task
        if task is not None and task not in adapters.names:
            raise _unknown("task", task, "adapters", adapters.names)
        adapter = adapters.number(task)
    elif adapters is not None:
        if task is not None and task not in adapters.names:
            raise _unknown("task", task, "adapters", adapters.names)
        if task is None and is_query is not None and prompt_name not in adapters.names:
            task = ROLES[is_query] if ROLES[is_query] in adapters.names else None
        name = prompt_name if prompt_name is not None else task
        adapter = adapters.number(task or name or default.name)
    elif task is not None:
        raise InputError(f"names an adapter, and {model.model_id} has none", param="task")
    if instruction is not None:
        if prompt_name is not None:
            raise InputError(
                "cannot be used with `prompt_name`, which chooses a prompt as it stands", param="instruction"
            )
        return _instruction_prompt(model, instruction), adapter
    if name is None:
        head = model.heads.multi_vector
        if is_query is None or head is None or default.replaces_roles:
            return default.text, adapter
        return head.role(is_query).prompt, adapter
    if not isinstance(name, str) or name not in model.prompts:
        raise _unknown("prompt_name", name, "prompts", model.prompts)
    return model.prompts[name], adapter


def _separate(
    model: Model, task: str | None, prompt_name: str | None, is_query: bool | None
) -> tuple[str | None, str | None]:
    """Returns the names of the adapter and the prompt, where one does not imply the other.

    Jina's API has `retrieval.query` and `retrieval.passage` in `task`: an adapter and a prompt.
    """
    for role, known in ROLES.items():
        if task == known:
            task, is_query = known.partition(".")[0], role
    if prompt_name is None and is_query is not None and PROMPTS[is_query] in model.prompts:
        prompt_name = PROMPTS[is_query]
    return task, prompt_name


# Text before and after the instruction, in the prompts of embedders that take one.
INSTRUCTED = (("Instruct: ", "\nQuery:"), ("<instruct>", "\n<query>"))


def _instruction_prompt(model: Model, instruction: str) -> str:
    """Returns the model's prompt of queries with another instruction. Raises InputError for a model without any."""
    check_text(instruction, "instruction")
    for prompt in model.prompts.values():
        for start, end in INSTRUCTED:
            before, found, after = prompt.partition(end)
            if found and before.startswith(start):
                return f"{start}{instruction}{end}{after}"
    raise InputError("is not read by this model, whose prompts have none", param="instruction")


def check_instruction_tokens(instruction: str, prompt: Encoded, limit: int) -> None:
    """Raises InputError if `prompt`, which has the instruction, leaves none of `limit` tokens to a text."""
    if prompt.truncated or prompt.tokens >= limit:
        raise InputError(
            f"has {len(instruction)} characters and leaves no token for a text; the limit is {limit} tokens",
            param="instruction",
        )


def check_pair_instruction(model: Model, instruction: str | None) -> None:
    """Raises InputError for an instruction if it is not a string, or if the model's pairs have none."""
    if instruction is None:
        return
    check_text(instruction, "instruction")
    if model.pair_text is None or model.pair_text.instructed is None:
        raise InputError("is not read by this model, which reads only the query and the document", param="instruction")


def output_width(model: Model, dimensions: int | None, param: str = "dimensions") -> int:
    """Columns of a vector cut to `dimensions`; None keeps all. Raises InputError for dimensions outside 1 … width."""
    width = model.width
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= width):
        raise InputError(f"must be from 1 to {width}, found {dimensions!r}", param=param)
    return dimensions or width


def resolve_limit(
    tokenizer: Tokenizer, limit: int | None, is_query: bool | None = None, param: str = "limit", others: str = ""
) -> int | None:
    """Returns the limit of a text's tokens; None keeps the model's. Raises InputError if it leaves no token.

    `others` are values that the caller allows too, in the error.
    """
    least = tokenizer.least_limit(is_query)
    if limit is not None and limit < least:
        raise InputError(f"must be {others}at least {least}; it is {limit}", param=param)
    return limit


def missing_tasks(
    model: Model, tasks: Task, *, reranks: bool = False, entails: bool = False, decides: bool = False
) -> list[str]:
    """Returns the names of the tasks that the model does not have.

    `reranks` requires a classifier of one label or late interaction, `entails` a label of entailment, `decides` that or
    a head for decisions.
    """
    for name, required in (("rerank", reranks), ("zero_shot", entails), ("decide", decides)):
        if required and name not in model.task_names:
            return [name]
    return task_names(tasks & ~model.tasks)


def require_tasks(
    model: Model,
    tasks: Task = NO_TASK,
    param: str = "texts",
    *,
    reranks: bool = False,
    entails: bool = False,
    decides: bool = False,
) -> None:
    """Raises InputError, which names `param`, if the model does not have the tasks. `missing_tasks` has the options."""
    missing = missing_tasks(model, tasks, reranks=reranks, entails=entails, decides=decides)
    if not missing:
        return
    reason, classifier = f"it has {', '.join(model.task_names)}", model.heads.classifier
    if classifier is not None and reranks:
        reason = f"scores need one label, and it has {len(classifier.labels)}; classify gives the score of each"
    elif classifier is not None and entails:
        reason = (
            "it has no label of entailment (entail… in label2id of config.json, of several labels); its labels: "
            f"{', '.join(classifier.labels)}"
        )
    raise InputError(f"does not have the task {', '.join(missing)}; {reason}", param=param, subject=model.model_id)


def _unknown(param: str, name: Any, kind: str, known: Any) -> InputError:
    description = repr(name)
    if isinstance(name, str) and (len(name) > _SHOWN_CHARACTERS or not name.isprintable()):
        description = f"a string of {len(name)} characters"
    return InputError(f"{description} is not known; this model's {kind}: {', '.join(known) or 'none'}", param=param)
