"""Bodies that are not quite what was asked for."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

Path = tuple[int | str, ...]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, -0.0, 1e308, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400,
    float("nan"), float("inf"), -float("inf"), "", " ", "\x00", "\ud800", "\udc00\ud800", "\U0001f600", "\ufeff",
    "x" * 5000, "é" * 3000, ". " * 4000, [], [[]], [[[]]], {}, {"a": 1}, [None], [True], [1, "a"], ["a", 1], ["a", [1]],
    [[1], ["a"]], [[1], []], [""], ["a", ""], [1.0], [-1], [30521], [30522], [2**31], [2**64], [[10**30]],
    "right", "LEFT", "float", "base64", "BASE64", [[101] * 600], [0] * 3000, ["a"] * 70, ["a"] * 2049,
    [[1] for _ in range(2049)],
    ["ab " * 400] * 8, [["a", "b"]], [["a"], ["a", "b"]], ["a", "b", "c"], {"text": "a"}, {"text": 1},
    [{"text": "a"}, "b"], [{"txt": "a"}], [{"text": ""}], ["text"], {"mode": "enabled"}, {"top_k": 1},
)  # fmt: skip
NAMES = (
    "extra", "__proto__", "constructor", "inputs", "input", "ids", "model", "dimensions", "truncate", "\x00", "",
    "query", "texts", "documents", "top_n", "text_1", "text_2", "parameters", "max_tokens_per_doc",
    "truncate_prompt_tokens",
)  # fmt: skip
SCRAPS = (
    b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"\xf4\x90\x80\x80", b'"', b"\\", b"\\ud800",
    b"\\u0000", b"{", b"}", b"[", b"]", b",", b":", b"null", b"NaN", b"-Infinity", b"1e999", b"1E-999", b"-", b"//x\n",
    b"/**/", b"'", b"\\x41", b"00", b"0x10", b"1_0", b"\r\n\r\n", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n",
)  # fmt: skip


# What a body repeats: the text before, what is repeated with its separator, and the text after.
REPEATED = (
    (b"", b"[", b"", b""), (b"[", b"[]", b",", b"]"), (b"[", b"[" * 150 + b"]" * 150, b",", b"]"),
    (b"[", b"{}", b",", b"]"), (b"[", b'{"a":' * 9 + b"1" + b"}" * 9, b",", b"]"), (b"[", b'["a"]', b",", b"]"),
    (b"[", b'["a","b"]', b",", b"]"), (b"[", b"[1]", b",", b"]"), (b"[", b"1", b",", b"]"), (b"[", b"1e9", b",", b"]"),
    (b"[", b'"a"', b",", b"]"), (b"[", b'""', b",", b"]"), (b"[", b'"\\\\"', b",", b"]"),
    (b"[", b'{"text":"a"}', b",", b"]"), (b"[", b'{"inputs":"a"}', b",", b"]"), (b"{", b'"a":1', b",", b"}"),
    (b"", b" ", b"", b'"a"'), (b"[", b" ", b"", b'"a"]'), (b"[ [", b" \n", b"", b"1]]"), (b'"', b" ", b"", b'"'),
    (b'"', b"a", b"", b'"'), (b'"', b"some words ", b"", b'"'), (b'"', "é".encode(), b"", b'"'),
    (b'"', b"\\u00e9", b"", b'"'), (b'"', b'\\"', b"", b'"'), (b'"', b"{}", b"", b'"'), (b'"', b"{{", b"", b'{}"'),
    (b'"', b"ab,", b"", b'"'), (b'"', b" ,", b"", b'"'), (b'"', b"{} word ", b"", b'"'), (b"", b"9", b"", b""),
)  # fmt: skip


def encode(value: Any, random: Random) -> bytes:
    """JSON, with characters beyond ASCII escaped or not; lone surrogates become the bytes they would be."""
    return json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def mutated(value: Any, random: Random) -> bytes:
    """A body that was `value` before one thing or a few happened to it."""
    return random.choices((_values, _names, _duplicates, _bytes, _cut, _documents), (40, 10, 7, 25, 8, 10))[0](
        value, random
    )


def multiplied(value: Any, random: Random) -> bytes:
    """A body with a field or two that hold much of the same: deep, wide, long, or of nothing but spaces."""
    fields = value if isinstance(value, dict) else {"inputs": value}
    encoded = {name: encode(each, random) for name, each in fields.items()}
    for _ in range(random.choice((1, 1, 2))):
        before, repeated, separator, after = random.choice(REPEATED)
        size = random.choices((100, 5_000, 60_000, 1_000_000), (25, 40, 30, 5))[0]
        count = max(1, size // len(repeated + separator))
        name = random.choice([*fields, *fields, *NAMES, "candidate_labels", "hypothesis_template", "instances"])
        encoded[name] = before + separator.join([repeated] * count) + after
    return b"{" + b",".join(encode(name, random) + b":" + each for name, each in encoded.items()) + b"}"


def _values(value: Any, random: Random) -> bytes:
    """Other values where some stood."""
    changed = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        changed = _put(changed, random.choice(list(_paths(changed))), copy.deepcopy(random.choice(VALUES)))
    return encode(changed, random)


def _names(value: Any, random: Random) -> bytes:
    """A field more, a field less, a field of another name."""
    if not isinstance(value, dict) or not value:
        return _values(value, random)
    changed = dict(value)
    if random.random() < 0.6:
        changed[random.choice(NAMES)] = random.choice(VALUES)
    if random.random() < 0.5:
        held = changed.pop(random.choice(list(changed)))
        if random.random() < 0.5:
            changed[random.choice(NAMES)] = held
    return encode(changed, random)


def _duplicates(value: Any, random: Random) -> bytes:
    """A key twice, with another value."""
    if not isinstance(value, dict) or not value:
        return _values(value, random)
    name = random.choice(list(value))
    pairs = [(key, each) for key, each in value.items()]
    pairs.insert(random.randint(0, len(pairs)), (name, random.choice(VALUES)))
    return b"{" + b",".join(encode(key, random) + b":" + encode(each, random) for key, each in pairs) + b"}"


def _bytes(value: Any, random: Random) -> bytes:
    """Bytes changed, lost and put in."""
    data = bytearray(encode(value, random))
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        place = random.randrange(len(data) + 1)
        match random.randrange(3):
            case 0 if place < len(data):
                data[place] = random.randrange(256)
            case 1:
                del data[place : place + random.choice((1, 1, 5, 40))]
            case _:
                data[place:place] = random.choice(SCRAPS)
    return bytes(data)


def _cut(value: Any, random: Random) -> bytes:
    data = encode(value, random)
    return data[: random.randrange(len(data) + 1)]


def _documents(value: Any, random: Random) -> bytes:
    field = (next(iter(value), "inputs") if isinstance(value, dict) else "inputs").encode()
    depth = random.choice((10, 200, 1000, 20_000))
    return random.choice((
        b"", b" ", b"null", b"[]", b"{}", b"1", b'"x"', b"true", b"\x1f\x8b\x08\x00garbage", b"\xff\xfe{\x00}\x00",
        b"{" * depth, b"[" * depth, b'{"%b":' % field * depth, b'{"%b":' % field + b"[" * depth + b"]" * depth + b"}",
        encode(value, random) + b" trailing", encode(value, random) * 2, b"\xef\xbb\xbf" + encode(value, random),
        b'{"%b":1%b}' % (field, b"0" * 5000), b'{"%b":[1%b]}' % (field, b"0" * 5000),
        b'{"%b":"a",%b}' % (field, b",".join(b'"k%d":1' % number for number in range(3000))),
        b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"0\r\n\r\nGET /livez HTTP/1.1\r\nhost: x\r\n\r\n",
    ))  # fmt: skip


def _paths(value: Any, front: Path = ()) -> Iterator[Path]:
    yield front
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _paths(each, (*front, name))
    elif isinstance(value, list):
        for index, each in enumerate(value[:8]):
            yield from _paths(each, (*front, index))


def _put(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = new
    return value
