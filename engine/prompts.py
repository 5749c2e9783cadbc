"""A model's prompts: texts that go before the input, by name, from sentence-transformers' file."""

from __future__ import annotations

from pathlib import Path

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import read_object
from embert.engine.models.encoder_config import Adapters

__all__ = ["prompts_with_adapters", "read_prompts"]


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the one that applies where a request names none. Raises BrokenModel."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    fields = read_object(path)
    prompts = fields.get("prompts") or {}
    if isinstance(prompts, dict):
        prompts = {name: text for name, text in prompts.items() if text is not None}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BrokenModel(f"{path}: prompts must map names to texts")
    default = fields.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise BrokenModel(f"{path}: default_prompt_name {default!r} is not among the prompts: {', '.join(prompts)}")
    return prompts, default


def prompts_with_adapters(prompts: dict[str, str], adapters: Adapters | None) -> dict[str, str]:
    """The prompts, and one for each adapter, of its name: what the prompts say, else the adapters' own text, else none.

    So whoever names an adapter's prompt, or its task, gets both.
    """
    if adapters is None:
        return prompts
    own = dict(adapters.prompts)
    of_adapters = {
        name: prompts.get(folder, own.get(name, ""))
        for name, folder in zip(adapters.names, adapters.folders or adapters.names, strict=True)
    }
    return {**of_adapters, **prompts}
