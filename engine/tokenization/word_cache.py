"""Caches of words: the ids of chunks that a tokenizer reads by themselves. A text's ids are theirs, laid end to end.

Real texts repeat their words, and a look-up costs about a tenth of the library. Filled on demand, and bounded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from tokenizers import pre_tokenizers

from embert.engine.tokenization.encoded import Direction
from embert.engine.tokenization.split_points import PLAIN, flat, splits_like_qwen

# BERT's normalizer removes control characters, some of which str.split takes for whitespace. A chunk of nothing else
# would have no tokens. Texts with any of them are rare and go to the library.
CONTROL_CHARACTERS = re.compile(r"[^\t\n\r -~]")

MAX_CHUNKS = 65_536  # about 12 MB
MAX_CHUNK_CHARACTERS = 64  # longer ones do not repeat

# New chunks that are at most a part of 1 / MOST_NEW of a text are read by themselves, which takes the library several
# times as long as within a text. Other texts go to it whole. The chunks of one of LEARN_EVERY of these are learned, and
# of more at first and where texts were known, so that random texts cost little more than without a cache.
MOST_NEW = 8
LEARN_EVERY = 32
_LONG_CHARACTERS, _BEGINNING, _WORDS = 256, 64, 3  # a text of more characters is judged by its first words
_COMPOSED = re.compile(f"[^\0-\u02ff\u2010-\u2027{PLAIN}]")  # characters that NFC may change

_ID_BYTES = 4  # int32
Ids = bytes  # int32 in native order
EncodeChunks = Callable[[Sequence[str]], Sequence[Ids]]


def word_cache_of(tokenizer: dict[str, Any], encode: EncodeChunks) -> WordCache | None:
    """The cache for a parsed tokenizer.json, or None. `encode` gives the library's ids of each text."""
    if WordCache.supports(tokenizer):
        return WordCache(encode)
    return ByteLevelCache(encode, tokenizer) if ByteLevelCache.supports(tokenizer) else None


class WordCache:
    """Chunk → ids of ASCII texts, exactly as a BERT tokenizer gives them. Safe to use from several threads.

    BERT's normalizer and pre-tokenizer treat every whitespace-separated chunk of an ASCII text by itself.
    """

    _spare: ClassVar[int] = 0  # chunks more than tokens that a text is cut to

    def __init__(self, encode: EncodeChunks) -> None:
        self._encode = encode
        self._ids: dict[str, Ids] = {}  # replaced, never cleared, so entries of this dict stay in it

    @staticmethod
    def supports(tokenizer: dict[str, Any]) -> bool:
        """True if a parsed tokenizer.json is of the kind described above."""

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

    def ids(self, texts: Sequence[str], limit: int | None, direction: Direction) -> list[Ids]:
        """Ids of each text. Of a text with more than `limit` tokens, at least its first (last) `limit` ones."""
        split = [self._split(text, limit, direction) for text in texts]
        found = self._find(split)
        if None not in found:
            return found  # type: ignore[return-value]  # None was just ruled out
        whole = iter(self._encode([text for text, ids in zip(texts, found, strict=True) if ids is None]))
        for index, chunks in enumerate(split):
            if found[index] is None:
                found[index] = ids = next(whole)
                if chunks is not None:
                    self._learn_from(texts[index], chunks, ids)
        return found  # type: ignore[return-value]  # each None was replaced

    def known_ids(self, texts: Sequence[str], limit: int | None, direction: Direction) -> list[Ids] | None:
        """Ids of each text without the library; None if a chunk is new."""
        known, found = self._ids.__getitem__, []
        try:
            for text in texts:
                chunks = self._split(text, limit, direction)
                if chunks is None:
                    return None
                found.append(b"".join(map(known, chunks)))
        except KeyError:
            return None
        return found

    def _split(self, text: str, limit: int | None, direction: Direction) -> list[str] | None:
        """The chunks that hold the first (last) `limit` tokens; None if the library must read the text as a whole."""
        chunks = self._chunks(text)
        if chunks is None or limit is None or len(chunks) <= limit + self._spare:
            return chunks
        most = limit + self._spare
        return chunks[:most] if direction == "right" else chunks[-most:]

    def _chunks(self, text: str) -> list[str] | None:
        """Splits a text into chunks of at least one token; None if the library must read it as a whole."""
        if not text.isascii() or (not text.isprintable() and CONTROL_CHARACTERS.search(text)):
            return None
        return text.split()

    def _find(self, texts: Sequence[list[str] | None]) -> list[Ids | None]:
        """The ids of texts in chunks; None for those that the library must read as a whole."""
        known = self._ids
        try:
            return [None if chunks is None else b"".join(map(known.__getitem__, chunks)) for chunks in texts]
        except KeyError:
            new = {chunk for chunks in texts if chunks is not None for chunk in chunks if chunk not in known}
        new_ids = self._read(new)
        return [None if chunks is None else _join(chunks, known, new_ids) for chunks in texts]

    def _learn_from(self, text: str, chunks: Sequence[str], ids: Ids) -> None:
        """May learn chunks of a text that the library has read as a whole."""

    def _read(self, new: Collection[str]) -> dict[str, Ids]:
        """The ids of new chunks, which are known from now on."""
        new_ids = dict(zip(new, self._encode([*new]), strict=True))
        self._learn(new_ids)
        return new_ids

    def _learn(self, new_ids: Mapping[str, Ids]) -> None:
        entries = {chunk: ids for chunk, ids in new_ids.items() if len(chunk) <= MAX_CHUNK_CHARACTERS}
        if len(self._ids) + len(entries) > MAX_CHUNKS:
            # The chunks that are learned first are the most common ones.
            count = MAX_CHUNKS // 2
            self._ids = dict(itertools.islice(self._ids.items(), count))
            entries = dict(itertools.islice(entries.items(), count))
        self._ids.update(entries)


class ByteLevelCache(WordCache):
    """Chunk → ids of GPT-2's, Qwen's and LLaMA 3's tokenizers, exactly as the library gives them.

    Their patterns match words from left to right. No match has a space after a character that is not whitespace, so
    chunks begin before spaces. With Qwen's and LLaMA 3's pattern no match has such a character after a newline, so
    chunks also end after newlines. A chunk stands alone if the first character after its space, and the last one before
    its newlines, is not whitespace. NFC joins neither a space nor a newline with what is before it.

    What a text that is not known costs in addition to the library is bounded: texts may be of random characters.
    """

    # The last chunk of a text that is cut may be another one in the whole text.
    _spare = 1

    def __init__(self, encode: EncodeChunks, tokenizer: Mapping[str, Any]) -> None:
        super().__init__(encode)
        self._lines = _is_qwens(tokenizer)  # chunks end after newlines
        self._pause = self._left = 0  # texts that are mostly new, until chunks of one are learned
        sizes = {token_id: len(token) for token, token_id in tokenizer["model"]["vocab"].items()}
        sizes |= {token["id"]: len(token["content"].encode()) for token in tokenizer.get("added_tokens") or ()}
        self._sizes = np.zeros(max(sizes) + 1, np.int32)  # bytes of each token
        self._sizes[[*sizes]] = [*sizes.values()]

    @staticmethod
    def supports(tokenizer: dict[str, Any]) -> bool:
        """True if a parsed tokenizer.json is of the kind described above."""
        normalizers = flat(tokenizer.get("normalizer"), "normalizers")
        steps = flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
        kinds = [(step["type"], step.get("add_prefix_space"), step.get("use_regex", True)) for step in steps]
        lines = _is_qwens(tokenizer)
        if not lines and kinds != [("ByteLevel", False, True)]:
            return False
        model = tokenizer.get("model") or {}
        if model.get("type") != "BPE" or model.get("dropout") or any(part["type"] != "NFC" for part in normalizers):
            return False
        if not model["vocab"].keys() >= {*pre_tokenizers.ByteLevel.alphabet()}:  # some bytes have no token
            return False
        # Added tokens are found first. One that lies within a chunk changes nothing, with the whitespace it takes.
        crossing = re.compile(r"\n\S|[\S\n] " if lines else r"\S ")
        return not any(
            crossing.search(token["content"]) or token["single_word"] or token["rstrip"] or (lines and token["lstrip"])
            for token in tokenizer.get("added_tokens") or ()
        )

    def _chunks(self, text: str) -> list[str] | None:
        if "\0" in text:
            return None
        parts = text.replace(" ", "\0 ")
        if self._lines and "\n" in text:
            parts = parts.replace("\n", "\n\0").replace("\n\0\n", "\n\n")
        return [*filter(None, parts.split("\0"))]

    def _split(self, text: str, limit: int | None, direction: Direction) -> list[str] | None:
        if self._left and len(text) > _LONG_CHARACTERS:
            _, *words = text[:_BEGINNING].split(" ", _WORDS + 1)
            if not any(f" {word}" in self._ids for word in words[:_WORDS]):
                self._left -= 1
                return None
        return super()._split(text, limit, direction)

    def _find(self, texts: Sequence[list[str] | None]) -> list[Ids | None]:
        return [None if chunks is None else self._find_one(chunks) for chunks in texts]

    def _find_one(self, chunks: list[str]) -> Ids | None:
        """The ids of a text in chunks; None if many are new."""
        found = [*map(self._ids.get, chunks)]
        if count := found.count(None):
            if count * MOST_NEW > len(chunks):
                return None
            new = {chunk for chunk, ids in zip(chunks, found, strict=True) if ids is None}
            if not all(map(self._stands_alone, new)):
                return None
            new_ids = self._read(new)
            found = [new_ids[chunk] if ids is None else ids for chunk, ids in zip(chunks, found, strict=True)]
        self._pause = self._left = 0
        return b"".join(found)  # type: ignore[arg-type]  # each None was replaced

    def _learn_from(self, text: str, chunks: Sequence[str], ids: Ids) -> None:
        if self._left:
            self._left -= 1
            return
        self._left = self._pause = min(self._pause + 1, LEARN_EVERY - 1)
        is_new = [chunk not in self._ids for chunk in chunks]
        if not all(map(self._stands_alone, itertools.compress(chunks, is_new))):
            return
        if not text.isascii() and _COMPOSED.search(text):
            return
        # Each token takes at least its bytes of the text. Where the sums are equal, each takes just these.
        stops = self._sizes[np.frombuffer(ids, np.int32)].cumsum()
        ends = np.cumsum([len(chunk.encode()) for chunk in chunks])
        if len(stops) and stops[-1] == ends[-1] == len(text.encode()):
            places = [0, *(_ID_BYTES * (stops.searchsorted(ends) + 1)).tolist()]
            spans = zip(chunks, places, places[1:], strict=False)
            self._learn({chunk: ids[start:stop] for chunk, start, stop in itertools.compress(spans, is_new)})

    def _stands_alone(self, chunk: str) -> bool:
        core = chunk.removeprefix(" ")
        if self._lines:
            core = core.rstrip("\n")
        return bool(core) and core[0].isprintable() and core[-1].isprintable()


def _is_qwens(tokenizer: Mapping[str, Any]) -> bool:
    """True if words are Qwen's or LLaMA 3's."""
    steps = flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    return splits_like_qwen(flat(tokenizer.get("normalizer"), "normalizers"), steps)


def _join(chunks: Iterable[str], known: Mapping[str, Ids], new: Mapping[str, Ids]) -> Ids:
    return b"".join([new[chunk] if chunk in new else known[chunk] for chunk in chunks])
