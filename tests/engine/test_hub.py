"""The hub: what it is sent, what the error says if it refuses or is silent, and what the cache makes unnecessary."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from embert import engine
from embert.engine.errors import BrokenModel, ModelNotFound
from tests.engine.conftest import BuildBert

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token_of_this_test"


@dataclass
class Hub:
    """A hub with one private model, `org/private`, for clients that send TOKEN."""

    folder: Path
    refusal: tuple[int, str] | None = None  # status and the hub's own error code, whatever the token
    tokens: set[str | None] = field(default_factory=set)  # of requests for the model

    def respond(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if "org/private" not in path:
            return 200, {}, b"{}"
        self.tokens.add(authorization)
        if self.refusal is not None:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]} if self.refusal[1] else {}, b""
        if authorization != f"Bearer {TOKEN}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        names = [str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file()]
        if "/tree/" in path:
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
            return 200, {}, json.dumps(tree).encode()
        if path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in names]
            return 200, {}, json.dumps({"id": "org/private", "sha": COMMIT, "siblings": siblings}).encode()
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        return 200, {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}, (self.folder / name).read_bytes()


@pytest.fixture
def hub(tmp_path: Path, build_bert: BuildBert, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine for the hub's client, and an empty cache."""
    from huggingface_hub import constants

    served = Hub(build_bert())
    monkeypatch.setattr("embert.engine.files.hub.HUB_TIMEOUT_S", 120)  # however busy this machine is
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, 120)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = served.respond(self.path, self.headers.get("authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - http.server's name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield served
        server.shutdown()


def test_token_of_the_environment_reads_a_private_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.folder / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = engine.load_model("org/private", progress=False)
    assert (model.model_id, model.revision) == ("org/private", COMMIT)
    assert (model.folder / "chat_template.jinja").is_file()
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_pickled_heads_are_fetched_but_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice names the command that converts them where they are, so that it needs no network."""
    (hub.folder / "sparse_linear.pt").write_bytes(b"no pickle")
    (hub.folder / "other.pt").write_bytes(b"no pickle")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = engine.load_model("org/private", progress=False)
    assert (model.folder / "sparse_linear.pt").is_file()
    assert not (model.folder / "other.pt").exists()
    (notice,) = model.notices
    assert notice.startswith(f"sparse_linear.pt in {model.folder} is pickled and not read: dense vectors only; ")


def test_without_a_token(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match=r"or it is private: set HF_TOKEN to a token that may read it$"):
        engine.load_model("org/private", progress=False)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((403, "GatedRepo"), "it is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"),
        ((404, "RevisionNotFound"), "the hub knows the model, but not this revision"),
        ((403, ""), "the hub refused HF_TOKEN (403): it is wrong, expired or may not read this"),
    ],
)
def test_what_the_hub_refuses(hub: Hub, monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str], said: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refusal = refusal
    with pytest.raises(ModelNotFound) as caught:
        engine.load_model("org/private", progress=False)
    assert str(caught.value).endswith(said)
    assert TOKEN not in str(caught.value)


def test_a_name_without_an_organization(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match=r"no organization, as in sentence-transformers/all-mpnet-base-v2$"):
        engine.load_model("all-mpnet-base-v2", progress=False)


def test_an_adapter_of_the_hub_names_no_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could name any model of this machine."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    base = shutil.copytree(hub.folder, tmp_path / "base")
    (hub.folder / "config.json").unlink()
    (hub.folder / "model.safetensors").rename(hub.folder / "adapter_model.safetensors")
    (hub.folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base), "target_modules": ["query"]})
    )
    with pytest.raises(BrokenModel, match=rf"{base} is not an id of the hub"):
        engine.load_model("org/private", progress=False)


@pytest.fixture
def silent_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """In the hub's place: accepts connections and never responds."""
    from huggingface_hub import constants

    monkeypatch.setattr("embert.engine.files.hub.HUB_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def cache(hub: Hub, folder: Path) -> Path:
    """A snapshot of the hub's model as the hub's client stores it. Returns its folder."""
    repository = folder / "cache" / "models--org--private"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(hub.folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_cached_model_asks_the_hub_nothing(
    hub: Hub, silent_hub: socket.socket, tmp_path: Path, revision: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = cache(hub, tmp_path)
    caplog.set_level("INFO", "embert")
    assert engine.load_model("org/private", revision=revision, progress=False).folder == snapshot
    with pytest.raises(BlockingIOError):
        silent_hub.accept()
    assert str(snapshot) in caplog.text


def lose_weights(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()


def lose_a_shard(snapshot: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def lose_config(snapshot: Path) -> None:
    (snapshot / "config.json").unlink()


def interrupt(snapshot: Path) -> None:
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "0123.incomplete").write_bytes(b"half")


@pytest.mark.parametrize("spoil", [lose_weights, lose_a_shard, lose_config, interrupt])
def test_what_the_cache_lacks_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    spoil(cache(hub, tmp_path))
    engine.load_model("org/private", progress=False)
    assert hub.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("model", ["org/private", "sentence-transformers/all-MiniLM-L6-v2"])
def test_hub_that_never_responds(silent_hub: socket.socket, model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "embert")
    if model == "org/private":
        with pytest.raises(ModelNotFound, match=r"did not respond in time: .*HF_ENDPOINT.*hf download") as caught:
            engine.load_model(model, progress=False)
        assert "Got:" not in str(caught.value)
    else:
        (notice,) = engine.load_model(model, progress=False).notices
        assert "using the packaged copy" in notice
    assert "asking the hub" in caplog.text


def test_no_hub_is_there(silent_hub: socket.socket) -> None:
    silent_hub.close()
    with pytest.raises(ModelNotFound, match=r"cannot be reached \(.+\): .*HF_ENDPOINT.*hf download"):
        engine.load_model("org/private", progress=False)
