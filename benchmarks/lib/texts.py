"""Texts of given lengths in tokens, made of English that every machine has: the standard library's docstrings."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of lengths in tokens, [CLS] and [SEP] included, clipped to `low` and `high`."""

    mean: float
    low: int
    high: int
    sigma: float = 0.5

    def draw(self, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return int64 [count]."""
        drawn = random.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


QUERY_TOKENS = Lengths(mean=11, low=4, high=32)
PASSAGE_TOKENS = Lengths(mean=104, low=16, high=256)


@dataclass(frozen=True, slots=True)
class Text:
    """One text and its length in tokens."""

    text: str
    tokens: int


def texts(lengths: Lengths, count: int, tokenizer: Path, seed: int = 0) -> list[Text]:
    """Return `count` different texts. Their lengths, counted by this tokenizer.json, follow `lengths`."""
    random = np.random.default_rng(seed)
    words = _words(str(tokenizer))
    start = int(random.integers(len(words)))
    stream = itertools.islice(itertools.cycle(words), start, None)
    return [_take(stream, int(length)) for length in lengths.draw(count, random)]


def _take(stream: Iterator[tuple[str, int]], tokens: int) -> Text:
    """Take words until the text has `tokens` tokens; the pieces of its last word may exceed that."""
    chosen, so_far = [], 2
    while so_far < tokens:
        word, pieces = next(stream)
        chosen.append(word)
        so_far += pieces
    return Text(" ".join(chosen), so_far)


@functools.cache
def _words(tokenizer: str) -> list[tuple[str, int]]:
    """Return the corpus as words, each with its number of tokens."""
    model = Tokenizer.from_file(tokenizer)
    model.no_padding()
    model.no_truncation()
    words = [word for docstring in _docstrings() for word in docstring.split() if any(map(str.isalpha, word))]
    pieces = {word: len(model.encode(word, add_special_tokens=False).ids) for word in set(words)}
    return [(word, pieces[word]) for word in words]


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in (
        "argparse",
        "datetime",
        "decimal",
        "difflib",
        "email",
        "logging",
        "statistics",
        "subprocess",
        "typing",
    ):
        place = library / name
        for source in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                    yield ast.get_docstring(node) or ""


def english(count: int) -> list[str]:
    """Different English sentences of 60 to 300 characters, from the manual that comes with Python."""
    sentences: dict[str, None] = {}
    for text in topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?]) +", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z][a-z]* .{60,300}\.", sentence):
                    sentences[sentence] = None
    if len(sentences) < count:
        raise ValueError(f"there are {len(sentences)} sentences, {count} were asked for")
    return list(sentences)[:count]
