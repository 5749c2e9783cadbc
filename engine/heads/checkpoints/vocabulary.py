"""Ids of tokens by name, for heads that treat some tokens specially."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import read_object

__all__ = ["Vocabulary"]


class Vocabulary:
    """A tokenizer's tokens and their ids, and which of them are special: read from its JSON files."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer.json of a `folder`, and the special tokens in the files beside it. Raises BrokenModel."""
        self.path = folder / "tokenizer.json"
        fields = read_object(self.path)
        try:
            stored = fields["model"]["vocab"]  # a list of [token, score] in a Unigram model
            self._ids = stored if isinstance(stored, dict) else {token: i for i, (token, _) in enumerate(stored)}
            self._ids = {**self._ids, **{entry["content"]: entry["id"] for entry in fields.get("added_tokens") or []}}
            valid = all(type(i) is int for i in self._ids.values())
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise BrokenModel(f"{self.path} has no vocabulary that can be read")
        self._special: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                self._special |= read_object(folder / name)

    def id(self, token: str) -> int | None:
        """A token's id; None for text that is no token."""
        token_id: int | None = self._ids.get(token)
        return token_id

    def ids(self, tokens: Iterable[str]) -> tuple[int, ...]:
        """The ids of those that are tokens, ascending."""
        return tuple(sorted({i for token in tokens if (i := self.id(token)) is not None}))

    def special(self, kind: str) -> str | None:
        """The special token that the files call "mask_token", "cls_token" or so; None where they name none."""
        value = self._special.get(kind)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None
