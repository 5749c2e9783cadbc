"""Chat templates of rerankers: what stands around a query and a document, as sentence-transformers' CrossEncoder asks.

A template is rendered at load only. It has to be plain text around both, which `read_pair_text` checks.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import TakesNoPair, UnsupportedModel
from embert.engine.files.json_files import read_object

RENDER_S = 60.0  # by the clock, on a busy machine too; render_template.py bounds CPU time and memory

# Texts that no template treats specially, and others, with white space that templates may remove.
SENTINELS = ("QUERY 7f3a", "DOCUMENT 91bc")
INSTRUCTIONS = ("INSTRUCTION c41d", " {{ x }} <y>\n")
BETWEEN = "\n\n"  # of a state and a question about it
PROBES = ((" a  b \n", ""), ("", "\n\tc. "), ("<x> {{ y }}", "z" * 300))


@dataclass(frozen=True, slots=True)
class PairText:
    """A pair becomes the text `before` + query + `between` + document + `after`, without further special tokens.

    A pair that is too long loses the end of its document, then of its query; the tokens of `after` stay.
    """

    before: str
    between: str
    after: str
    instructed: tuple[str, str] | None = None  # around an instruction, in place of `before`; None: it takes none

    def with_instruction(self, instruction: str) -> PairText:
        """Replaces the text before a query by one with an instruction. Requires `instructed`."""
        assert self.instructed is not None  # noqa: S101 - callers check
        return dataclasses.replace(self, before=instruction.join(self.instructed))

    def join(self, query: str, document: str) -> str:
        return f"{self.before}{query}{self.between}{document}{self.after}"


def template_of(folder: Path, arguments: Mapping[str, Any]) -> tuple[Path, str] | None:
    """The chat template of a tokenizer's folder, and its file; None if it has none.

    `arguments` are the tokenizer's, and may hold another template. Raises UnsupportedModel for several.
    """
    if isinstance(stated := arguments.get("chat_template"), str):
        return folder / "sentence_bert_config.json", stated
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path, path.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template = stated or (read_object(path).get("chat_template") if path.is_file() else None)
    if template is not None and not isinstance(template, str):
        raise UnsupportedModel(f"{path}: several templates in chat_template are not supported; supported: one")
    return None if template is None else (path, template)


def read_pair_text(
    path: Path, source: str, *, structured: bool | None, prompt: str, variables: Mapping[str, Any]
) -> PairText:
    """The text around a query and a document, by the template `source` of the file `path`.

    `structured` is whether a message's content is a list; None: as the template looks. `prompt` becomes a system
    message, and `variables` are the template's own. Raises BrokenModel, TakesNoPair, and UnsupportedModel for a
    template that does more than put text around both.
    """
    if structured is None:
        structured = any(part in source for part in ("content[0]", ".type", "'type'", '"type"', "message.content["))

    def content(text: str) -> object:
        return [{"type": "text", "text": text}] if structured else text

    def rendering(query: str, document: str) -> dict[str, Any]:
        texts = {"system": prompt, "query": query, "document": document}
        messages = [
            {"role": role, "content": content(text)} for role, text in texts.items() if text or role != "system"
        ]
        return {"messages": messages, "add_generation_prompt": False, **variables}

    query, document = SENTINELS
    pair_text = _text_around(path, source, rendering, PROBES)

    def with_system(instruction: str) -> dict[str, Any]:
        system = {"role": "system", "content": content(instruction)}
        plain = rendering(query, document)
        return {**plain, "messages": [system, *(each for each in plain["messages"] if each["role"] != "system")]}

    try:
        texts = _render(path, source, [with_system(each) for each in INSTRUCTIONS])
    except TakesNoPair:  # other roles are an error there
        return pair_text
    head, _, rest = texts[0].partition(INSTRUCTIONS[0])
    around = head, rest.partition(query)[0]
    expected = [dataclasses.replace(pair_text, before=each.join(around)).join(query, document) for each in INSTRUCTIONS]
    return dataclasses.replace(pair_text, instructed=around if texts == expected else None)


def read_decision_text(path: Path, source: str, *, variables: Mapping[str, Any]) -> PairText:
    """The text around a state and a question about it, both of one user message, up to the first token of the reply.

    Arguments and errors are those of `read_pair_text`. Thinking is off.
    """

    def rendering(state: str, question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{state}{BETWEEN}{question}"}]
        return {"messages": messages, "add_generation_prompt": True, "enable_thinking": False, **variables}

    # Templates may remove white space at both ends of a message.
    probes = [(state.lstrip() or "a", question.rstrip() or "b") for state, question in PROBES]
    return _text_around(path, source, rendering, probes)


def _text_around(
    path: Path, source: str, rendering: Callable[[str, str], dict[str, Any]], probes: Sequence[tuple[str, str]]
) -> PairText:
    """The text around two texts, by what a template makes of `rendering`. Raises as `read_pair_text`."""
    query, document = SENTINELS
    pairs = (SENTINELS, (query, ""), ("", document), *probes)
    first, without_document, without_query, *results = _render(path, source, [rendering(*pair) for pair in pairs])
    if first in (without_document, without_query):
        raise TakesNoPair(f"{path}: the chat template does not take a query and a document")
    before, _, rest = first.partition(query)
    between, place, after = rest.partition(document)
    pair_text = PairText(before, between, after)
    if not place or results != [pair_text.join(*probe) for probe in probes]:
        raise UnsupportedModel(
            f"{path}: a chat template that does more than put text around a query and then a document is not supported"
        )
    return pair_text


def _render(path: Path, source: str, renderings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of a template, by a separate process (render_template.py). Raises TakesNoPair, UnsupportedModel."""
    script = Path(__file__).with_name("render_template.py")
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(script)],
            input=json.dumps({"source": source, "renderings": renderings}),
            capture_output=True,
            text=True,
            timeout=RENDER_S,
            check=False,
        )
        result = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise UnsupportedModel(
            f"{path}: rendering the chat template for a few short texts takes too long or too much memory"
        ) from None
    if "missing" in result:
        raise UnsupportedModel(f"{path}: a chat template needs jinja2: pip install jinja2")
    if "error" in result:
        raise TakesNoPair(f"{path}: the chat template does not take a query and a document: {result['error']}")
    texts: list[str] = result["texts"]
    return texts
