"""Finds points where a long text may be divided: the tokens of its chunks, end to end, are the tokens of the whole.

A tokenizer normalizes, finds added tokens, splits into words and looks up each word by itself. A split point is a place
that no step looks across. Split points follow from tokenizer.json, by a list of components of known behavior:

    any that splits at spaces    before a single space (or newline) between two plain letters or digits
    byte-level                   also between an ASCII letter and a digit: its pattern never joins them
    Qwen's and LLaMA 3's words   before a single space, and after a newline before a plain letter or digit
    BERT                         also next to whitespace, ideographs, and punctuation that no added token has

Parts other than the first may need a `lead` before them, so that they do not look like the start of a text; the caller
drops its tokens. A tokenizer that no rule covers has no split points: its texts are tokenized whole.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Library

from embert.engine.errors import NoSplitPoint
from embert.engine.files.tokenizer_config import DEBERTA_SPACES, QWEN_PATTERN
from embert.engine.tokenization.encoded import Direction, unbroken

# Letters and digits that no normalizer named below joins with a space, reorders, or chunks into a space: no combining
# marks, nothing that extends or precedes a grapheme, no compatibility character that contains a space.
PLAIN = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-ΡΣ-ΩάέήίαβγδεζηθικλμνξοπρςστυφχψωА-яЁёא-תء-يअ-हก-ฮぁ-ゖァ-ヺ一-鿿가-힣"
_BEFORE = PLAIN + ".,;:!?)。！？，、；："  # noqa: RUF001  # may also stand before the space

_NORMALIZERS = {
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Precompiled", "Replace",
}  # fmt: skip
_SPLIT_AT_SPACES = {"BertPreTokenizer", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit"}
_PRE_TOKENIZERS = _SPLIT_AT_SPACES | {"Digits", "Punctuation"}
_MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}

# Patterns of spaces that a Replace may have: they never match a single space between two plain characters, or make one
# space of a single newline.
_REPLACED = ({"Regex": " {2,}"}, {"Regex": DEBERTA_SPACES})

# Qwen's words and LLaMA 3's.
_WORDS = [(pattern, "Isolated", False) for pattern in (QWEN_PATTERN, QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))]

_LEAD = "a"
_WINDOW = 65_536
SEEN = 2  # characters after a place that a pattern looks at


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """The split points of one tokenizer, as patterns of zero width; None if there are none."""

    of_ids: re.Pattern[str] | None = None  # the parts' ids are the whole's
    of_offsets: re.Pattern[str] | None = None  # the parts' ids and offsets are the whole's
    lead: str = ""  # goes before every part but the first
    word_edge: int | None = None  # characters to keep at either end of an ASCII word that is too long to be known

    def end(self, text: str, start: int, least: int, most: int, pattern: re.Pattern[str] | None) -> int:
        """The index where a chunk from `start` on may end: at least `least` characters on, if the text has as many.

        Raises NoSplitPoint if there is none within `most` characters.
        """
        if len(text) - start <= least:
            return len(text)
        match = pattern.search(text, start + least, start + most + SEEN) if pattern is not None else None
        if match is not None:
            return match.start()
        if len(text) - start > most:
            raise NoSplitPoint
        return len(text)

    def start(self, text: str, end: int, least: int, most: int, pattern: re.Pattern[str] | None) -> int:
        """The index where a chunk that ends at `end` may start: like `end`, from the other side."""
        if end <= least:
            return 0
        high, floor, width = end - least, max(0, end - most), 64
        while pattern is not None and high > floor:
            low = max(floor, high - width)
            places = [match.start() for match in pattern.finditer(text, low, high + SEEN) if match.start() <= high]
            if places:
                return places[-1]
            high, width = low, min(2 * width, _WINDOW)
        if floor:
            raise NoSplitPoint
        return 0

    def shorten(self, text: str, inside: int) -> str | None:
        """The text without the middle of the long ASCII word around `inside`; None if it is short or its ids matter.

        WordPiece gives every word of more than `max_input_chars_per_word` characters the same token.
        """
        if self.word_edge is None:
            return None
        first, last = _word_start(text, inside), _word_end(text, inside)
        if last - first <= 2 * self.word_edge:
            return None
        return text[: first + self.word_edge] + text[last - self.word_edge :]


class TextParts:
    """The parts of one text, from the end that is kept when the text is cut."""

    def __init__(
        self,
        text: str,
        split_points: SplitPoints,
        direction: Direction,
        most: int,
        *,
        index: int,
        param: str,
        offsets: bool = False,
    ) -> None:
        """`most` characters may lack a split point. `index` and `param` are for messages.

        `offsets` asks for split points that keep offsets, too, and not only ids.
        """
        self._text, self._split_points, self._most = text, split_points, most
        self.index, self.param = index, param
        self._left = direction == "left"
        self._pattern = split_points.of_offsets if offsets else split_points.of_ids
        self._shorten = not offsets  # shortening moves offsets
        self.start, self._end = 0, len(text)  # of what is left

    @property
    def more(self) -> bool:
        return self.start < self._end

    def take(self, size: int) -> tuple[bool, str]:
        """The next part, of `size` characters or somewhat more, and whether the lead was put before it.

        Raises InputTooLarge if the text has no split point within the limit.
        """
        most = max(size, self._most)
        while True:
            try:
                start, end = self._next(size, most)
                break
            except NoSplitPoint:
                inside = self._end - size if self._left else self.start + size
                shorter = self._split_points.shorten(self._text, inside) if self._shorten else None
                if shorter is None:
                    raise unbroken(self.index, self._end - self.start, self._most, self.param) from None
                self._end -= len(self._text) - len(shorter)
                self._text = shorter
        if self._left:
            self._end = start
        else:
            self.start = end
        lead = self._split_points.lead if start else ""
        return bool(lead), lead + self._text[start:end]

    def _next(self, size: int, most: int) -> tuple[int, int]:
        if self._left:
            return self._split_points.start(self._text, self._end, size, most, self._pattern), self._end
        return self.start, self._split_points.end(self._text, self.start, size, most, self._pattern)


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()


def _word_end(text: str, place: int) -> int:
    """The end of the ASCII letters and digits from `place` on. Strides are ten times as fast as a pattern."""
    stride = _WINDOW
    while stride:
        while place + stride <= len(text) and _is_word(text[place : place + stride]):
            place += stride
        stride //= 4
    return place


def _word_start(text: str, place: int) -> int:
    stride = _WINDOW
    while stride:
        while place >= stride and _is_word(text[place - stride : place]):
            place -= stride
        stride //= 4
    return place


def split_points_of(description: dict[str, Any], library: Library) -> SplitPoints:
    """The split points of a tokenizer. `description` is its tokenizer.json, parsed."""
    added = list(description.get("added_tokens") or ())
    contents = [str(token["content"]) for token in added]
    pre_tokenizers = flat(description.get("pre_tokenizer"), "pretokenizers")
    kinds = [part["type"] for part in pre_tokenizers]
    if not _crosses_no_space(added, library) or not _is_known_model(description.get("model") or {}):
        return SplitPoints()
    normalizers = flat(description.get("normalizer"), "normalizers")
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
    single_word = any(token.get("single_word") for token in added)
    if kinds == ["BertPreTokenizer"] and all(part["type"] in ("BertNormalizer", "Lowercase") for part in normalizers):
        places = _bert(normalizers, contents, single_word=single_word)
        general = re.compile(f"(?<=[{_BEFORE}])(?=[ \n][{PLAIN}])")
        edge = None
        if (description["model"] or {}).get("type") == "WordPiece" and not any(map(_is_word, contents)):
            limit = description["model"].get("max_input_chars_per_word", 100)
            edge = limit + 1 + max(map(len, contents), default=0)
        return SplitPoints(places, general if strips else places, word_edge=edge)
    if splits_like_qwen(normalizers, pre_tokenizers):
        of_offsets = f"(?<=\n)(?=[{PLAIN}])"  # offsets of a text's first token may have its space
        return SplitPoints(re.compile(f"(?<=[{_BEFORE}])(?= [{PLAIN}])|{of_offsets}"), re.compile(of_offsets))
    if not _are_known(normalizers, _NORMALIZERS) or not _are_known(pre_tokenizers, _PRE_TOKENIZERS):
        return SplitPoints()
    if not _SPLIT_AT_SPACES.intersection(kinds) or {"ByteLevel", "Metaspace"}.intersection(kinds[:-1]):
        return SplitPoints()
    spaces = "".join(space for space in " \n" if _splits(library, space))
    if " " not in spaces:
        return SplitPoints()
    rules = [f"(?<=[{_BEFORE}])(?=[{spaces}][{PLAIN}])"]
    has_joint = any(re.search("[A-Za-z][0-9]", content) for content in contents)
    if kinds[-1] == "ByteLevel" and not has_joint and not single_word:
        rules.append("(?<=[A-Za-z])(?=[0-9])")
    pattern = re.compile("|".join(rules))
    return SplitPoints(pattern, pattern, lead=_LEAD)


def _bert(normalizers: list[dict[str, Any]], contents: list[str], *, single_word: bool) -> re.Pattern[str]:
    # To added tokens with single_word, the underscore is a letter.
    single = [character for character in string.punctuation + "。、！？，" if character != "_"]  # noqa: RUF001
    free = "".join(character for character in single if not any(character in content for content in contents))
    ideographs = any(part.get("handle_chinese_chars") for part in normalizers)
    ideograph = "一-鿿" if ideographs and not single_word and all(map(str.isascii, contents)) else ""
    kind = f"[ \t\n\r{re.escape(free)}{ideograph}]"
    return re.compile(f"(?<={kind})|(?={kind})")


def splits_like_qwen(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> bool:
    """True if words are those of a known pattern, which never joins a newline with what follows it."""
    if [part["type"] for part in pre_tokenizers] != ["Split", "ByteLevel"] or not _are_known(normalizers, {"NFC"}):
        return False
    split, byte_level = pre_tokenizers
    words = split["pattern"].get("Regex"), split["behavior"], split["invert"]
    return words in _WORDS and not byte_level["add_prefix_space"] and not byte_level["use_regex"]


def flat(component: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    if component.get("type") == "Sequence":
        return [part for member in component.get(members) or () for part in flat(member, members)]
    return [component]


def _crosses_no_space(added: list[dict[str, Any]], library: Library) -> bool:
    """True if no added token can reach across a space between plain characters."""
    before, after = re.compile(f"[{_BEFORE}]"), re.compile(f"[{PLAIN}]")
    for token in added:
        content = str(token["content"])
        forms = [content]
        if token.get("normalized") and library.normalizer is not None:
            forms.append(library.normalizer.normalize_str(content))
        if not content or any(not form or re.search(r"\s", form) for form in forms):
            return False
        if token.get("lstrip") and any(after.match(form) for form in forms):
            return False
        if token.get("rstrip") and any(before.match(form[-1]) for form in forms):
            return False
    return True


def _is_known_model(model: dict[str, Any]) -> bool:
    return model.get("type") in _MODELS and not model.get("dropout")


def _are_known(parts: list[dict[str, Any]], kinds: set[str]) -> bool:
    for part in parts:
        if part["type"] not in kinds:
            return False
        if part["type"] == "Replace" and part.get("pattern") not in _REPLACED:
            return False
        if part["type"] == "ByteLevel" and not part.get("use_regex", True):
            return False
        if part["type"] == "Metaspace" and not part.get("split", True):
            return False
    return True


def _splits(library: Library, space: str) -> bool:
    """True if this character between two words divides them. A normalizer's table may map a newline to a space."""
    text = f"a{space}b"
    if library.normalizer is not None:
        text = library.normalizer.normalize_str(text)
    if library.pre_tokenizer is None or not re.fullmatch(r"a\sb", text):
        return False
    pieces = library.pre_tokenizer.pre_tokenize_str(text)
    return len(pieces) > 1 and pieces[0][1] == (0, 1)
