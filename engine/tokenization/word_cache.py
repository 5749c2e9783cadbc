"""Token ids of ASCII texts from the cached ids of their words, exactly as the tokenizer gives them.

BERT's normalizer and pre-tokenizer treat every whitespace-separated chunk of an ASCII text by itself, so a text's ids
are its chunks' ids laid end to end. Real texts repeat their words, and a look-up costs about a tenth of WordPiece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["WordCache"]

# BERT's normalizer removes control characters, some of which str.split takes for whitespace. A chunk of nothing else
# would have no tokens. Texts with any of them are rare and go to the library.
CONTROL_CHARACTERS = re.compile(r"[^\t\n\r -~]")

MAX_CHUNKS = 65_536  # about 12 MB
MAX_CHUNK_CHARACTERS = 64  # longer ones do not repeat

Ids = bytes  # int32 in native order
EncodeChunks = Callable[[Sequence[str]], Sequence[Ids]]


class WordCache:
    """Chunk → ids. Filled on demand, and bounded. Safe to use from several threads."""

    def __init__(self, encode: EncodeChunks) -> None:
        """`encode` gives the library's ids of each text, without special tokens."""
        self._encode = encode
        self._ids: dict[str, Ids] = {}

    @staticmethod
    def supports(tokenizer: dict[str, Any]) -> bool:
        """Whether a parsed tokenizer.json is of the kind described above."""

        def kind(part: str) -> Any:
            return (tokenizer.get(part) or {}).get("type")

        if (kind("normalizer"), kind("pre_tokenizer"), kind("model")) != (
            "BertNormalizer",
            "BertPreTokenizer",
            "WordPiece",
        ):
            return False
        # Added tokens are found first. One without whitespace lies within a chunk, so it changes nothing. A tokenizer
        # with one that looks at its neighbors or at the normalized text is left to the library.
        return all(
            len(token["content"].split()) == 1
            and token["content"] == token["content"].strip()
            and not any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip", "normalized"))
            for token in tokenizer.get("added_tokens") or ()
        )

    def chunks(self, text: str) -> list[str] | None:
        """The chunks of a text, or None if the library must tokenize it as a whole.

        Each chunk is at least one token.
        """
        if not text.isascii() or (not text.isprintable() and CONTROL_CHARACTERS.search(text)):
            return None
        return text.split()

    def known(self, texts: Sequence[Sequence[str]]) -> list[Ids] | None:
        """The ids of texts that `chunks` has split, or None if a chunk is new."""
        known = self._ids
        try:
            return [b"".join(map(known.__getitem__, chunks)) for chunks in texts]
        except KeyError:
            return None

    def lookup(self, texts: Sequence[Sequence[str]]) -> list[Ids]:
        """The ids of texts that `chunks` has split."""
        if (ids := self.known(texts)) is not None:
            return ids
        known = self._ids  # replaced, never cleared, so entries of this dict stay in it
        unknown = list({chunk for chunks in texts for chunk in chunks if chunk not in known})
        new_ids = dict(zip(unknown, self._encode(unknown), strict=True))
        joined = [b"".join([new_ids.get(chunk) or known[chunk] for chunk in chunks]) for chunks in texts]
        self._learn(new_ids)
        return joined

    def _learn(self, new_ids: dict[str, Ids]) -> None:
        learned = {chunk: ids for chunk, ids in new_ids.items() if len(chunk) <= MAX_CHUNK_CHARACTERS}
        if len(self._ids) + len(learned) > MAX_CHUNKS:
            # Clearing is cheaper than tracking use, and common words return after a few texts.
            self._ids = {}
            learned = dict(list(learned.items())[:MAX_CHUNKS])
        self._ids.update(learned)
