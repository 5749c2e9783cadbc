"""Texts to token ids, as the model's tokenizer.json says, cut to the model's length.

The work can be done in turns, between which others get theirs, and the caller may stop. A long text is divided where
that provably makes no difference (engine/cuts.py), and no more of it is read than the model can.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from embert.engine.cuts import Cuts, Unbroken, cuts_of
from embert.engine.errors import BrokenModel, InputError, InputTooLarge
from embert.engine.json_files import read_object
from embert.engine.model import Model
from embert.engine.word_cache import WordCache

__all__ = ["NO_LIMIT", "Direction", "Encoded", "TokenInfo", "Tokenizer", "Turns", "finish"]

Direction = Literal["right", "left"]  # the end that is cut off

ID_BYTES = 4  # int32

# A turn is what is done in one go: a few milliseconds of one thread.
TURN_CHARACTERS = 16_384
TURN_PLACES = 8_192  # characters of a turn that also says where tokens are
TURN_IDS = 16_384
BULK_TURN_CHARACTERS = 1 << 24  # where nobody waits for a turn: enough for all cores at once
# The first part of a long text: likely to be enough, and small beside a turn.
LEAST_PART_CHARACTERS, CHARACTERS_A_TOKEN = 2048, 8
NO_LIMIT = 1 << 62

ResultT = TypeVar("ResultT")
Turns = Generator[int, None, ResultT]  # yields between turns: the tokens so far


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of B texts, laid end to end."""

    ids: npt.NDArray[np.int32]  # [T]
    lengths: npt.NDArray[np.int32]  # [B], each 1 … max_input_length
    truncated: int  # how many of the B texts were cut

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.ids)

    @property
    def sequences(self) -> int:
        """B, the number of texts."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token of a text; `start` and `stop` count characters and are None for special tokens."""

    id: int
    text: str  # the characters it stands for; a special token's own name
    special: bool
    start: int | None
    stop: int | None


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads, which then run at the same time.

    The library's padding and truncation stay off: cutting is done here, on ids, so that one object serves requests that
    cut differently.
    """

    def __init__(self, model: Model) -> None:
        """Read the model's tokenizer.json. Raises BrokenModel."""
        path = model.transformer_folder / "tokenizer.json"
        description = read_object(path)
        try:
            # The whole file is read again in Rust; handing over the parsed object would cost more.
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BrokenModel(f"{path} is not a tokenizer that can be read: {error}") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocab_size = model.config.vocab_size  # ids that may be given: 0 … vocab_size - 1
        self.max_input_length = model.max_input_length  # tokens, special tokens included
        if self._backend.get_vocab_size() > self.vocab_size:
            raise BrokenModel(
                f"{path} has {self._backend.get_vocab_size()} tokens, the model has embeddings for {self.vocab_size}"
            )
        if model.lowercase:
            self._lowercase()
        self._prefix, self._suffix = self._special_ids()
        # How many tokens of the text itself fit.
        self._room = self.max_input_length - (len(self._prefix) + len(self._suffix)) // ID_BYTES
        if self._room < 1:
            raise BrokenModel(f"{path}: no room for text within max_input_length {self.max_input_length}")
        self._words = WordCache(self._library) if not model.lowercase and WordCache.supports(description) else None
        self._cuts = cuts_of(description, self._backend)
        self._lead_ids = len(self._library([self._cuts.lead])[0]) // ID_BYTES
        self._part = max(LEAST_PART_CHARACTERS, min(TURN_CHARACTERS, CHARACTERS_A_TOKEN * self._room))

    def encode(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        direction: Direction = "right",
        prompt: str = "",
        param: str = "inputs",
    ) -> Encoded:
        """Tokenize, with the special tokens of a single text.

        `prompt` is put before every text. `direction` is the end that is cut off. `param` is the request field that
        errors name. Raises InputError for a text that is too long while `truncate` is false, or is not valid Unicode.
        """
        return finish(
            self.encode_turns(
                texts,
                truncate=truncate,
                direction=direction,
                prompt=prompt,
                param=param,
                turn_characters=BULK_TURN_CHARACTERS,
            )
        )

    def encode_turns(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        direction: Direction = "right",
        prompt: str = "",
        param: str = "inputs",
        most_unbroken: int = NO_LIMIT,
        turn_characters: int = TURN_CHARACTERS,
    ) -> Turns[Encoded]:
        """As `encode`, in turns of about `turn_characters`.

        Raises InputTooLarge, before that work, for a text that has no place to divide it for over `most_unbroken`
        characters.
        """
        if prompt:
            texts = [prompt + text for text in texts]
        sizes = [*map(len, texts)]
        try:
            if sum(sizes) <= turn_characters and max(sizes, default=0) <= self._part:
                bodies = self._bodies(texts, self._wanted(truncate), direction)
            else:
                bodies = []
                for group in _groups([min(size, self._part) for size in sizes], turn_characters):
                    parts = [_Parts(text, self._cuts, direction, most_unbroken) for text in texts[group]]
                    yield from self._long_bodies(parts, bodies, truncate, direction, param, turn_characters)
        except TypeError:
            _check_unicode(texts, param)
            raise
        return self._encoded(bodies, truncate, direction, param)

    def _long_bodies(
        self,
        parts: Sequence[_Parts],
        bodies: list[bytes],
        truncate: bool,
        direction: Direction,
        param: str,
        turn_characters: int,
    ) -> Turns[None]:
        """Append the ids of texts of which some have several parts, or as many of them as are wanted."""
        first = len(bodies)
        bodies += self._bodies_of_parts(parts, self._part, truncate, direction, first, param)
        tokens = sum(map(len, bodies)) // ID_BYTES
        yield tokens
        for index, part in enumerate(parts, first):
            while part.more and len(bodies[index]) <= self._room * ID_BYTES:
                (body,) = self._bodies_of_parts([part], turn_characters, truncate, direction, index, param)
                bodies[index] = bodies[index] + body if direction == "right" else body + bodies[index]
                tokens += len(body) // ID_BYTES
                yield tokens
            if part.more and not truncate:
                overhead = len(self._prefix) + len(self._suffix)
                raise self._too_long(index, (len(bodies[index]) + overhead) // ID_BYTES - 1, param, "more than ")

    def _bodies_of_parts(
        self, parts: Sequence[_Parts], size: int, truncate: bool, direction: Direction, first: int, param: str
    ) -> list[bytes]:
        """Ids of the next part of each text; `first` is the place of the first text."""
        taken = []
        for index, part in enumerate(parts, first):
            try:
                taken.append(part.take(size))
            except Unbroken:
                raise part.too_large(index, param) from None
        bodies = self._bodies([text for _, text in taken], self._wanted(truncate), direction)
        lead = self._lead_ids * ID_BYTES
        return [body[lead:] if led else body for (led, _), body in zip(taken, bodies, strict=True)]

    def encode_known(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        direction: Direction = "right",
        prompt: str = "",
        param: str = "inputs",
    ) -> Encoded | None:
        """As `encode`, but None unless every word was seen before: a tenth of the work, which no thread is worth."""
        if self._words is None:
            return None
        split = []
        for text in texts:
            chunks = self._words.chunks(prompt + text if prompt else text)
            if chunks is None:
                return None
            split.append(_cut(chunks, self._wanted(truncate), direction))
        bodies = self._words.known(split)
        return None if bodies is None else self._encoded(bodies, truncate, direction, param)

    def _wanted(self, truncate: bool) -> int | None:
        """Tokens that need be known: a little past the limit is enough to cut, but not to say how long a text is."""
        return self._room + 1 if truncate else None

    def _encoded(self, bodies: Sequence[bytes], truncate: bool, direction: Direction, param: str) -> Encoded:
        """Ids of texts without special tokens, cut, put between those and laid end to end."""
        limit, truncated = self._room * ID_BYTES, 0
        lengths = array("i")
        pieces: list[bytes] = []
        overhead = len(self._prefix) + len(self._suffix)
        for body in bodies:
            if len(body) > limit:
                if not truncate:
                    raise self._too_long(len(pieces) // 3, (len(body) + overhead) // ID_BYTES, param)
                truncated += 1
                body = body[:limit] if direction == "right" else body[-limit:]
            pieces += (self._prefix, body, self._suffix)
            lengths.append((len(body) + overhead) // ID_BYTES)
        # A bytearray, so that the array is writable, which torch asks for.
        ids = np.frombuffer(bytearray().join(pieces), np.int32)
        return Encoded(ids, np.frombuffer(lengths, np.int32) if lengths else np.zeros(0, np.int32), truncated)

    def from_ids(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        truncate: bool,
        direction: Direction = "right",
        param: str = "inputs",
    ) -> Encoded:
        """Take token ids as they are: nothing is added. Raises InputError for ids that the model does not have."""
        return finish(self.from_ids_turns(sequences, truncate=truncate, direction=direction, param=param))

    def from_ids_turns(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        truncate: bool,
        direction: Direction = "right",
        param: str = "inputs",
    ) -> Turns[Encoded]:
        """As `from_ids`, in turns."""
        ids, lengths, truncated, limit = array("i"), array("i"), 0, self.max_input_length
        turn = TURN_IDS
        for index, given in enumerate(sequences):
            sequence = given
            if not len(sequence):
                raise InputError(f"`{param}`: sequence {index} has no token ids", param=param)
            if len(sequence) > limit:
                if not truncate:
                    raise self._too_long(index, len(sequence), param)
                truncated += 1
                sequence = sequence[:limit] if direction == "right" else sequence[-limit:]
            self._check_ids(index, sequence, param)
            ids.extend(sequence)
            lengths.append(len(sequence))
            if len(ids) >= turn:
                turn = len(ids) + TURN_IDS
                yield len(ids)
        return Encoded(np.array(ids, np.int32), np.array(lengths, np.int32), truncated)

    def _check_ids(self, index: int, sequence: Sequence[int], param: str) -> None:
        """Raise InputError for an id that the model does not have, or that is no int: an array takes True for 1."""
        if sequence and (not {int} >= {*map(type, sequence)} or min(sequence) < 0 or max(sequence) >= self.vocab_size):
            wrong = next(i for i in sequence if type(i) is not int or not 0 <= i < self.vocab_size)
            raise self._bad_id(index, wrong, param)

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        prompt: str = "",
        param: str = "inputs",
    ) -> list[list[TokenInfo]]:
        """Tokens with their places. With a prompt, places count from the prompt's first character. Nothing is cut."""
        answer: list[list[TokenInfo]] = [[] for _ in texts]
        for turn in self.tokenize_turns(texts, add_special_tokens=add_special_tokens, prompt=prompt, param=param):
            for index, tokens in turn:
                answer[index] += tokens
        return answer

    def tokenize_turns(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        prompt: str = "",
        param: str = "inputs",
        most_unbroken: int = NO_LIMIT,
    ) -> Iterator[list[tuple[int, list[TokenInfo]]]]:
        """As `tokenize`, in turns: each gives the next tokens of some texts, by the place of the text.

        Raises InputTooLarge, before that work, for a text that has no place to divide it for over `most_unbroken`
        characters.
        """
        texts = [prompt + text for text in texts]
        for group in _groups([min(len(text), TURN_PLACES) for text in texts], TURN_PLACES):
            parts = {
                index: _Parts(texts[index], self._cuts, "right", most_unbroken, places=True)
                for index in range(group.start, group.stop)
            }
            answer = [(index, [*self._special[0]] if add_special_tokens else []) for index in parts]
            while parts:
                try:
                    self._find_places(parts, dict(answer), param)
                except TypeError:
                    _check_unicode(texts, param)
                    raise
                if add_special_tokens:
                    for index, tokens in answer:
                        if not parts[index].more:
                            tokens += self._special[1]
                yield answer
                parts = {index: part for index, part in parts.items() if part.more}
                answer = [(index, []) for index in parts]

    def _find_places(self, parts: dict[int, _Parts], answer: dict[int, list[TokenInfo]], param: str) -> None:
        """Append the tokens of the next part of each text."""
        taken, starts = [], []
        for index, part in parts.items():
            starts.append(part.start)
            try:
                taken.append(part.take(TURN_PLACES))
            except Unbroken:
                raise part.too_large(index, param) from None
        encodings = self._backend.encode_batch([text for _, text in taken], add_special_tokens=False)
        for tokens, at, (led, text), encoding in zip(answer.values(), starts, taken, encodings, strict=True):
            first = self._lead_ids if led else 0
            shift = at - (len(self._cuts.lead) if led else 0)
            tokens += [
                TokenInfo(token_id, text[start:stop], False, start + shift, stop + shift)
                for token_id, (start, stop) in zip(encoding.ids[first:], encoding.offsets[first:], strict=True)
            ]

    def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, param: str = "ids"
    ) -> list[str]:
        """Token ids back to text. Raises InputError for ids that the model does not have."""
        return finish(self.decode_turns(sequences, skip_special_tokens=skip_special_tokens, param=param))

    def decode_turns(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, param: str = "ids"
    ) -> Turns[list[str]]:
        """As `decode`, in turns of whole sequences."""
        texts: list[str] = []
        tokens = 0
        for group in _groups([*map(len, sequences)], TURN_IDS):
            for index in range(group.start, group.stop):
                self._check_ids(index, sequences[index], param)
            chosen = [list(sequence) for sequence in sequences[group]]
            texts += self._backend.decode_batch(chosen, skip_special_tokens=skip_special_tokens)
            tokens += sum(map(len, chosen))
            yield tokens
        return texts

    def _bodies(self, texts: Sequence[str], wanted: int | None, direction: Direction) -> list[bytes]:
        """Ids of each text without special tokens; at least its `wanted` first (last) ones where it has more."""
        words = self._words
        if words is None:
            return self._library(texts)
        split = [None if (c := words.chunks(text)) is None else _cut(c, wanted, direction) for text in texts]
        if None not in split:
            return words.lookup(split)  # type: ignore[arg-type]  # None was just ruled out
        whole = iter(self._library([t for t, chunks in zip(texts, split, strict=True) if chunks is None]))
        looked_up = iter(words.lookup([chunks for chunks in split if chunks is not None]))
        return [next(whole if chunks is None else looked_up) for chunks in split]

    def _library(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as the library gives them, without special tokens. TypeError for a text with a surrogate."""
        # The batch calls release the GIL; `encode` holds it.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def _special_ids(self) -> tuple[bytes, bytes]:
        """What the post-processor puts before and after a text."""
        bare, full = (self._backend.encode("a", add_special_tokens=special) for special in (False, True))
        before = full.special_tokens_mask.index(0)
        after = before + len(bare)
        if full.ids[before:after] != bare.ids:
            raise BrokenModel("the tokenizer puts special tokens inside a text, not around it")
        named = [
            TokenInfo(token_id, token, True, None, None) for token_id, token in zip(full.ids, full.tokens, strict=True)
        ]
        self._special = named[:before], named[after:]
        return array("i", full.ids[:before]).tobytes(), array("i", full.ids[after:]).tobytes()

    def _lowercase(self) -> None:
        """Lowercase before everything else: sentence_bert_config.json's do_lower_case."""
        normalizer = self._backend.normalizer
        self._backend.normalizer = Normalizers([Lowercase(), *([normalizer] if normalizer else [])])

    def _too_long(self, index: int, tokens: int, param: str, more: str = "") -> InputError:
        return InputError(
            f"`{param}`: text {index} has {more}{tokens} tokens, the limit is {self.max_input_length}; "
            "shorten it or set truncate to true",
            param=param,
        )

    def _bad_id(self, index: int, token_id: object, param: str) -> InputError:
        # int() of a JSON number may have any number of digits, and repr refuses more than 4300 of them.
        shown = repr(token_id) if not isinstance(token_id, int) or abs(token_id) < 10**20 else "out of all bounds"
        return InputError(
            f"`{param}`: sequence {index} has the token id {shown}; ids are integers from 0 to {self.vocab_size - 1}",
            param=param,
        )


class _Parts:
    """A text that is taken part by part, from the end that is kept."""

    __slots__ = ("_cuts", "_end", "_left", "_most", "_pattern", "_shorten", "_text", "start")

    def __init__(self, text: str, cuts: Cuts, direction: Direction, most: int, *, places: bool = False) -> None:
        self._text, self._cuts, self._most = text, cuts, most
        self._left = direction == "left"
        self._pattern = cuts.of_places if places else cuts.of_ids
        self._shorten = not places  # which would move them
        self.start, self._end = 0, len(text)  # of what is left

    @property
    def more(self) -> bool:
        """Whether anything is left."""
        return self.start < self._end

    def take(self, size: int) -> tuple[bool, str]:
        """The next part, of `size` characters or somewhat more, and whether a lead was put before it."""
        most = max(size, self._most)
        while True:
            try:
                start, end = self._next(size, most)
                break
            except Unbroken:
                inside = self._end - size if self._left else self.start + size
                shorter = self._cuts.shorten(self._text, inside) if self._shorten else None
                if shorter is None:
                    raise
                self._end -= len(self._text) - len(shorter)
                self._text = shorter
        if self._left:
            self._end = start
        else:
            self.start = end
        led = bool(start and self._cuts.lead)
        return led, (self._cuts.lead if led else "") + self._text[start:end]

    def _next(self, size: int, most: int) -> tuple[int, int]:
        if self._left:
            return self._cuts.start(self._text, self._end, size, most, self._pattern), self._end
        return self.start, self._cuts.end(self._text, self.start, size, most, self._pattern)

    def too_large(self, index: int, param: str) -> InputTooLarge:
        return InputTooLarge(
            f"`{param}`: text {index} has {self._end - self.start} characters and no place to divide it for "
            f"{self._most} of them, which is the limit",
            param=param,
        )


def finish(turns: Turns[ResultT]) -> ResultT:
    """Take all turns, one after the other."""
    while True:
        try:
            next(turns)
        except StopIteration as last:
            result: ResultT = last.value
            return result


def _groups(sizes: Iterable[int], most: int) -> Iterator[slice]:
    """Runs of neighbours that are together at most `most`, or one that is more."""
    first = last = together = 0
    for last, size in enumerate(sizes, 1):
        if together and together + size > most:
            yield slice(first, last - 1)
            first, together = last - 1, 0
        together += size
    if first < last:
        yield slice(first, last)


def _cut(chunks: list[str], wanted: int | None, direction: Direction) -> list[str]:
    """The chunks that hold the `wanted` first (last) tokens: each is at least one."""
    if wanted is None or len(chunks) <= wanted:
        return chunks
    return chunks[:wanted] if direction == "right" else chunks[-wanted:]


def _check_unicode(texts: Sequence[str], param: str) -> None:
    """Raise InputError for the first text with a lone surrogate, which the library does not take for a str."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"`{param}`: text {index} is not valid Unicode: it has a lone surrogate", param=param, kind="tokenizer"
            ) from None
