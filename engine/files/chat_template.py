"""Chat templates of rerankers: what stands around a query and a document, as sentence-transformers' CrossEncoder asks.

A template is rendered at load only. It has to be plain text around both, which `read_pair_text` checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import read_object

__all__ = ["PairText", "read_pair_text", "template_of"]

# Texts that no template treats in a way of their own, and others, with white space that templates may remove.
SENTINELS = ("QUERY 7f3a", "DOCUMENT 91bc")
PROBES = ((" a  b \n", ""), ("", "\n\tc. "), ("<x> {{ y }}", "z" * 300))


@dataclass(frozen=True, slots=True)
class PairText:
    """A pair becomes the text `before` + query + `between` + document + `after`, without further special tokens.

    A pair that is too long loses the end of its document, then of its query; the tokens of `after` stay.
    """

    before: str
    between: str
    after: str

    def joined(self, query: str, document: str) -> str:
        """The text of a pair."""
        return f"{self.before}{query}{self.between}{document}{self.after}"


def template_of(folder: Path) -> tuple[Path, str] | None:
    """The chat template of a tokenizer's folder, and its file; None if it has none.

    Raises UnsupportedModel for several.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path, path.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template = read_object(path).get("chat_template") if path.is_file() else None
    if template is not None and not isinstance(template, str):
        raise UnsupportedModel(f"{path}: several templates in chat_template are not supported; supported: one")
    return None if template is None else (path, template)


def read_pair_text(folder: Path, *, structured: bool | None, prompt: str, variables: Mapping[str, Any]) -> PairText:
    """The text around a query and a document.

    `structured` is whether a message's content is a list; None: as the template looks. `prompt` becomes a system
    message, and `variables` are the template's own. Raises BrokenModel, and UnsupportedModel for a template that does
    more than put text around both.
    """
    found = template_of(folder)
    if found is None:
        raise BrokenModel(f"{folder} has no chat template, and its modules ask for one")
    path, source = found
    if structured is None:
        structured = any(part in source for part in ("content[0]", ".type", "'type'", '"type"', "message.content["))
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise UnsupportedModel(f"{path}: a chat template needs jinja2: pip install jinja2") from None

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def content(text: str) -> object:
        return [{"type": "text", "text": text}] if structured else text

    def rendered(query: str, document: str) -> str:
        texts = {"system": prompt, "query": query, "document": document}
        messages = [
            {"role": role, "content": content(text)} for role, text in texts.items() if text or role != "system"
        ]
        return str(template.render(messages=messages, **{"add_generation_prompt": False, **variables}))

    # As transformers makes it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(source)
        before, query, rest = rendered(*SENTINELS).partition(SENTINELS[0])
        between, document, after = rest.partition(SENTINELS[1])
        pair_text = PairText(before, between, after)
        plain = bool(query and document) and all(rendered(*probe) == pair_text.joined(*probe) for probe in PROBES)
    except (jinja2.TemplateError, TypeError) as error:
        raise UnsupportedModel(f"{path}: the chat template takes no query and document: {error}") from None
    if not plain:
        raise UnsupportedModel(
            f"{path}: a chat template that does more than put text around a query and then a document is not supported"
        )
    return pair_text
