"""Keys: which are accepted, where they come from, which routes need none, and the response to a wrong one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.config.options import KEY_FILE_LIMIT
from embert.server.frontend.routes import keyless_paths
from embert.server.http.auth import Keys
from embert.server.http.errors import Unauthorized
from tests.server.live import STAND_IN, Live, live, until

CANARY = "canary-51bd"


def accepts(keys: Keys, key: str, path: str = "/embed", method: str = "POST") -> bool:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    try:
        keys.check({"path": path, "method": method, "headers": headers})
    except Unauthorized:
        return False
    return True


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


# --- a server ---


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# for the tests\nfrom-file\n\n  indented-ünïcode  \n")
    return file


@pytest.fixture(scope="module")
def guarded(key_file: Path) -> Iterator[Live]:
    options = ["--workers", "2", "--served-model-name", "mini", "--log-level", "debug"]
    options += ["--api-key", "first key", "--api-key", "second", "--api-key-file", str(key_file), "--keyless", "docs"]
    with live(*STAND_IN, *options, ready=False) as running:
        running.wait_announced()
        yield running


@pytest.fixture(scope="module")
def stranger(guarded: Live) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        yield client


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *((f"Bearer {key}", "") for key in ("first key", "second", "from-file", "indented-ünïcode")),
        ("bearer  second", ""),
        (None, "missing"),
        ("", "missing"),
        ("Bearer", "wrong"),
        (f"Bearer {CANARY}", "wrong"),
        ("Bearer first", "wrong"),
        ("Bearer First Key", "wrong"),
        ("Basic second", "wrong"),
        ("second", "wrong"),
        ("Bearer # for the tests", "wrong"),
    ],
)
def test_keys(stranger: httpx.Client, value: str | None, says: str) -> None:
    headers = {} if value is None else {b"authorization": value.encode()}
    response = stranger.post("/embed", json={"inputs": "a"}, headers=headers)
    assert response.status_code == (401 if says else 200)
    if says:
        assert says in response.json()["error"]
    assert CANARY not in response.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/embed"), ("POST", "/v1/embeddings"), ("GET", "/v1/models"), ("GET", "/info"), ("GET", "/metrics"),
     ("GET", "/nothing"), ("POST", "/")],
)  # fmt: skip
def test_401(stranger: httpx.Client, method: str, path: str) -> None:
    response = stranger.request(method, path, headers={"authorization": f"Bearer {CANARY}"})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()
    if path.startswith("/v1/"):
        assert error["error"].items() >= {"type": "authentication_error", "code": "invalid_api_key"}.items()
    else:
        assert error["error_type"] == "Unauthorized"
    assert "Authorization: Bearer" in response.text
    assert CANARY not in response.text


def test_documentation_and_probes_need_no_key(stranger: httpx.Client) -> None:
    paths = ("/health", "/ping", "/livez", "/docs", "/openapi.json", "/static-offline-docs/swagger-ui-bundle.js")
    assert {path: stranger.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)


def test_openais_client(guarded: Live) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="second", max_retries=0) as client:
        assert client.models.list().data[0].id == "mini"
        assert client.embeddings.create(model="mini", input="a").model == "mini"
        # The model's own id is good too, but the response has the served name.
        assert client.embeddings.create(model="sentence-transformers/all-MiniLM-L6-v2", input="a").model == "mini"
        assert client.models.retrieve("sentence-transformers/all-MiniLM-L6-v2").id == "mini"
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="third", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.embeddings.create(model="mini", input="a")
        assert refused.value.code == "invalid_api_key"


def test_a_running_server_reads_a_changed_key_file(guarded: Live, key_file: Path) -> None:
    def status(key: str) -> int:
        return guarded.post("/embed", {"inputs": "a"}, headers={"authorization": f"Bearer {key}"}).status_code

    assert (status("from-file"), status("new")) == (200, 401)
    key_file.write_text("new\n")
    until(lambda: all(status("new") == 200 for _ in range(6)), what="the new key, in both processes")
    until(lambda: all(status("from-file") == 401 for _ in range(6)), what="the end of the old key")
    for secret in (CANARY, "first key", "from-file"):
        assert secret not in guarded.log
