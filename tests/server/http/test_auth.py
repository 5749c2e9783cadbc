"""Keys: which are accepted, where they come from, which routes need none, and the response to a wrong one."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import pytest

from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.config.options import KEY_FILE_LIMIT
from embert.server.frontend.routes import keyless_paths
from embert.server.http.auth import Keys
from embert.server.http.errors import Unauthorized


def accepts(keys: Keys, key: str, path: str = "/embed", method: str = "POST") -> bool:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    try:
        keys.check({"path": path, "method": method, "headers": headers})
    except Unauthorized:
        return False
    return True


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        *(({"authorization": f"Bearer {key}"}, "") for key in ("first key", "second", "from-file", "indented-ünïcode")),
        ({"authorization": "bearer  second"}, ""),
        ({}, "missing"),
        ({"authorization": ""}, "missing"),
        ({"authorization": "Bearer"}, "wrong"),
        *(({"authorization": f"Bearer {key}"}, "wrong") for key in ("canary", "first", "First Key", "# for the tests")),
        *(({"authorization": value}, "wrong") for value in ("Basic second", "second")),
        # Azure's header field
        ({"api-key": "second"}, ""),
        ({"api-key": "wrong"}, "wrong"),
        ({"api-key": ""}, "missing"),
        ({"api-key": "second", "authorization": "Bearer wrong"}, "wrong"),
        ({"api-key": "wrong", "authorization": "Bearer second"}, ""),
    ],
    ids=str,
)
def test_header_fields_with_keys(tmp_path: Path, headers: dict[str, str], says: str) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the tests\nfrom-file\n\n  indented-ünïcode  \n")
    keys = Keys(ServeConfig(api_key=("first key", "second"), api_key_file=str(file)))
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    with pytest.raises(Unauthorized, match=f"is {says}") if says else contextlib.nullcontext() as refused:
        keys.check({"path": "/embed", "method": "POST", "headers": fields})
    assert refused is None or "canary" not in refused.value.message


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("first\n")
    keys = Keys(ServeConfig(api_key=("fixed",), api_key_file=str(file)))
    assert accepts(Keys(ServeConfig()), "")
    assert [accepts(keys, key) for key in ("fixed", "first", "second")] == [True, True, False]

    (tmp_path / "new").write_text("first\nsecond\n")
    (tmp_path / "new").replace(file)  # as Kubernetes does it
    keys.refresh()
    assert [accepts(keys, key) for key in ("fixed", "first", "second")] == [True, True, True]

    file.write_text("# the first has gone\nsecond\n")
    keys.refresh()
    assert [accepts(keys, key) for key in ("fixed", "first", "second")] == [True, False, True]

    before = file.stat()
    file.write_text("# the first has gone\nthird.\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.refresh()
    assert not accepts(keys, "third.")
    keys.refresh(forced=True)
    assert [accepts(keys, key) for key in ("second", "third.")] == [False, True]
    file.write_text("# the first has gone\nsecond\n")
    keys.refresh(forced=True)

    for spoil in (lambda: file.write_text("# none\n"), file.unlink):
        spoil()
        keys.refresh()
        keys.refresh()
        assert [accepts(keys, key) for key in ("fixed", "second", "")] == [True, True, False]
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 2  # one each, not for each look
    assert "second" not in caplog.text


def test_comments_in_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufefffirst\n\t # the second\n  second  \n\n#third\n", encoding="utf-8")
    keys = Keys(ServeConfig(api_key_file=str(file)))
    assert [accepts(keys, key) for key in ("first", "second")] == [True, True]
    assert not any(accepts(keys, key) for key in ("# the second", "#third", "third", "\ufefffirst"))
    assert len(read_api_keys(ServeConfig(api_key_file=str(file)))) == 2


def test_a_key_may_hold_any_characters_that_a_header_can_carry(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    odd = ["foo\x85long", "a\u2028b", "\u2028c\u2029", "a b", "\xa0d\xa0", "é🔑", "#" + "x"]
    file.write_bytes("\r\n".join(odd).encode() + b"\r\n\t last \t")
    keys = Keys(ServeConfig(api_key=("  option\n",), api_key_file=str(file)))
    assert [accepts(keys, key) for key in (*odd, "last", "option")] == [True] * (len(odd) - 1) + [False, True, True]
    assert not any(accepts(keys, key) for key in ("foo", "long", "a", "b", "c", "d"))


@pytest.mark.parametrize("control", ["\x00", "\r", "\x1c", "\x7f"])
def test_a_key_with_a_control_character_is_refused(tmp_path: Path, control: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"first\ns3cret{control}s3cret\n".encode())
    with pytest.raises(ConfigError, match=r"line 2 ") as error:
        read_api_keys(ServeConfig(api_key_file=str(file)))
    assert "s3cret" not in str(error.value)
    with pytest.raises(ConfigError, match="--api-key number 2 "):
        read_api_keys(ServeConfig(api_key=("first", f"a{control}b")))


def test_a_key_file_must_be_a_regular_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Opening a FIFO waits for a writer, and a device may never end."""
    fifo = tmp_path / "keys"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_api_keys(ServeConfig(api_key_file=str(path)))
    fifo.unlink()
    fifo.write_text("k\n")
    keys = Keys(ServeConfig(api_key_file=str(fifo)))
    fifo.unlink()
    os.mkfifo(fifo)
    keys.refresh()
    assert accepts(keys, "k")
    assert str(fifo) in caplog.text
    fifo.unlink()
    with fifo.open("wb") as file:
        file.truncate(KEY_FILE_LIMIT + 1)
    with pytest.raises(ConfigError, match=str(KEY_FILE_LIMIT)):
        read_api_keys(ServeConfig(api_key_file=str(fifo)))


@pytest.mark.parametrize(
    ("keyless", "wanted"),
    [
        (("probes", "page"), {"/": True, "/health": True, "/livez": True, "/metrics": False, "/docs": False}),
        (("probes",), {"/": False, "/health": True, "/livez": True, "/metrics": False, "/docs": False, "/info": False}),
        (("none",), {"/health": False, "/livez": False, "/metrics": False, "/docs": False, "/info": False}),
        (("metrics",), {"/": False, "/health": True, "/readyz": True, "/metrics": True, "/docs": False}),
        (("probes", "docs"), {"/readyz": True, "/metrics": False, "/docs": True, "/openapi.json": True}),
    ],
)
def test_which_routes_need_no_key(keyless: tuple[str, ...], wanted: dict[str, bool]) -> None:
    config = ServeConfig(api_key=("k",), keyless=keyless)
    keys = Keys(config, keyless_paths(config.keyless_groups))
    for path, is_open in wanted.items():
        assert accepts(keys, "", path, "GET") is is_open, path
        assert not accepts(keys, "", path, "POST")
        assert accepts(keys, "k", path, "GET")
