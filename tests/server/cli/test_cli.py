"""The command line: `embert embed`, `embert info`, and how options reach the configuration."""

from __future__ import annotations

import fcntl
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embert import __version__
from embert.server.cli.main import parse_serve
from embert.server.config import (
    ConfigError,
    ServeConfig,
    read_api_keys,
)
from tests.server.bulk.running import BLOCK, embedded
from tests.server.cli.command import run
from tests.server.live import ROOT, STAND_IN, environment
from tests.server.models import copy_model, edit_json
from tests.server.stand_in import expected

TEXTS = ["Hello, world", "a second text", "Ünïcode 👩‍🚀"]


# --- embed ---


def test_embed_prints_a_json_line_a_text_with_what_the_server_answers(
    capsys: pytest.CaptureFixture[str], http: Any
) -> None:
    status, out, _ = run(capsys, "embed", "--device", "cpu", "--dimensions", "8", *TEXTS)
    assert status == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    served = http.post("/embed", json={"inputs": TEXTS, "dimensions": 8}).json()
    assert np.allclose([line["embedding"] for line in lines], served, atol=1e-6)


def test_embed_a_file_to_npy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = tmp_path / "texts", tmp_path / "vectors.npy"
    source.write_text("Hello, world\r\na second text\n\nlast line without an end", encoding="utf-8")
    status, out, _ = run(
        capsys, "embed", "--file", str(source), "--output", str(target), "--no-normalize", "--quiet", *STAND_IN
    )
    assert (status, out) == (0, "")
    vectors = np.load(target)
    assert vectors.shape == (4, 384)  # an empty line is a text too: its vector keeps the others in their lines
    assert vectors.dtype == np.float32
    assert np.allclose(vectors[2], expected([101, 102]), atol=1e-6)


def test_embed_with_a_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    edit_json(copy_model(tmp_path) / "config_sentence_transformers.json", prompts={"query": "find: "})
    _, out, _ = run(capsys, "embed", "-m", str(tmp_path), "--prompt-name", "query", "cats", *STAND_IN)
    prompted = json.loads(out)
    _, out, _ = run(capsys, "embed", "-m", str(tmp_path), "find: cats", *STAND_IN)
    assert prompted == {"text": "cats", "embedding": json.loads(out)["embedding"]}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "give texts, or --file"),
        (("a", "--file", "x"), 2, "not both"),
        (("--file", "/nonexistent/texts"), 1, "/nonexistent/texts"),
        (("--file", "/nonexistent/texts", "--model", "/nonexistent/model"), 1, "/nonexistent/texts"),
        (("--file", "/"), 1, "error: /: is a directory"),
        (("a", "--output", "/nonexistent/vectors", "--model", "/nonexistent/model"), 1, "/nonexistent/vectors"),
        (("a", "--resume", "--output", "x"), 2, "--resume goes with --file and --output"),
        (("--file", "/dev/null", "--resume"), 2, "--resume goes with --file and --output"),
        (("a", "--output", "/nonexistent/vectors"), 1, "/nonexistent/vectors"),
        (("a", "--dimensions", "0"), 1, "1 to 384"),
        (("a", "--dimensions", "385"), 1, "385"),
        (("a", "--dimensions", "many"), 2, "--dimensions"),
        (("a", "--prompt-name", "query"), 1, "query"),
        (("word " * 300, "--no-truncate"), 1, "the limit is 256"),
        (("a", "--model", "/nonexistent"), 1, "/nonexistent"),
        (("a", "--dtype", "int4"), 2, "--dtype"),
        (("a", "--device", "tpu"), 1, "'tpu'"),
        (("a", "--encoder", "none.such:thing"), 1, "none.such"),
        (("a", "--sparse", "--multi"), 2, "not allowed with"),
        (("a", "--queries"), 2, "--queries goes with --multi"),
        (("a", "--sparse", "--dimensions", "8"), 2, "--sparse goes without --dimensions and --no-normalize"),
        (("a", "--multi", "--no-normalize"), 2, "--multi goes without --dimensions and --no-normalize"),
        (("a", "--sparse", "-o", "x.npy"), 2, "--sparse writes JSON lines or Parquet: an array x.npy cannot hold"),
        (("a", "--sparse"), 1, "does not have the task sparse; it has embed, tokens"),
        (("a", "--multi"), 1, "does not have the task multi_vector; it has embed, tokens"),
        (("a", "--encoder", "cuda-portable", "--device", "cpu"), 1, "cuda-portable encoder does not run on device cpu"),
    ],
)
def test_embed_errors(
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    encoder = () if "--encoder" in arguments or "--device" in arguments else STAND_IN
    found, out, err = run(capsys, "embed", "--quiet", *encoder, *arguments)
    assert found == status
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_embed_reads_standard_input_as_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "embert.server.cli.main", "embed", "-f", "-", "--dimensions", "4", *STAND_IN],
        input="Ünïcode 👩‍🚀\n".encode(),
        cwd=ROOT,
        env=environment({"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "LC_ALL": "C"}),
        capture_output=True,
        check=True,
    )
    assert json.loads(ended.stdout)["text"] == "Ünïcode 👩‍🚀"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fine\n\xff\n"), "latin-1"))
    failed = embedded("-f", "-")
    assert failed.returncode == 1
    assert "standard input line 2 is not UTF-8: byte 0xff at position 1" in failed.stderr


# --- embed into files: nothing is lost ---


LINES = 2 * BLOCK + 90


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.write_text("".join(f"text {number}\n" for number in range(LINES)))
    return path


def into(texts: Path, target: Path, *options: str) -> tuple[int, str]:
    """Exit status and stderr of a run."""
    ended = embedded("--dimensions", "8", "-f", texts, "-o", target, *options)
    return ended.returncode, ended.stderr


def test_embed_resumes_only_what_it_would_have_made_itself(texts: Path, tmp_path: Path) -> None:
    target = tmp_path / "vectors.npy"
    partial, progress = tmp_path / "vectors.npy.partial", tmp_path / "vectors.npy.partial.json"
    good = texts.read_bytes()
    texts.write_bytes(good.replace(b"text 300\n", b"\xff\n"))
    assert into(texts, target)[0] == 1
    kept = partial.read_bytes(), progress.read_bytes()

    def refused(*options: str) -> str:
        status, err = into(texts, target, "--resume", *options)
        assert status == 1
        assert "omit --resume" in err
        return err

    assert "--dimensions was 8 in" in refused("--dimensions", "9")
    texts.write_bytes(good.replace(b"text 17\n", b"another\n"))
    assert f"the first {BLOCK} lines of" in refused()
    texts.write_bytes(good)
    progress.write_bytes(b"{")
    assert "is damaged" in refused()
    progress.write_bytes(kept[1])
    partial.write_bytes(kept[0][:-1])
    assert "has lost its end" in refused()
    partial.write_bytes(kept[0])
    with partial.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        status, err = into(texts, target)
        assert status == 1
        assert "another run is writing" in err
    assert (partial.read_bytes(), progress.read_bytes()) == kept
    assert into(texts, target)[0] == 0  # without --resume it is replaced
    assert np.load(target).shape == (LINES, 8)


def test_embed_into_a_device_a_folder_and_a_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "embed", "-q", "a", "-o", "/dev/null", *STAND_IN)[0] == 0
    assert run(capsys, "embed", "-q", "a", "-o", str(tmp_path), *STAND_IN)[0] == 1
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(mode=0o600)
    link.symlink_to(target)
    assert run(capsys, "embed", "-q", "a", "-o", str(link), *STAND_IN)[0] == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["text"] == "a"
    assert target.stat().st_mode & 0o777 == 0o600


# --- info ---


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", "--json", "--device", "cpu")
    facts = json.loads(out)
    assert status == 0
    assert facts["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert (facts["architecture"], facts["layers"], facts["hidden_size"], facts["vocabulary"]) == (
        "bert",
        6,
        384,
        30522,
    )
    assert (facts["pooling"], facts["dimensions"], facts["max_input_length"]) == ("mean", 384, 256)
    assert (facts["encoder"], facts["device"], facts["dtype"]) == ("cpu", "cpu", "float32")


@pytest.mark.cpu("kernels")
def test_info_of_int8_has_the_agreement_with_float32(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", "--json", "--device", "cpu", "--dtype", "int8")
    facts = json.loads(out)
    assert (status, facts["dtype"]) == (0, "int8")
    assert facts["agreement"]["worst"] >= 0.999
    assert facts["agreement"]["neighbors"] >= 0.97


def test_info_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", *STAND_IN)
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if len(line.split()) == 2)
    assert lines["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert lines["encoder"] == "stand-in"
    assert "max input length" in out


@pytest.mark.parametrize("as_json", [True, False])
def test_info_of_a_model_that_cannot_run_here(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    status, out, err = run(capsys, "info", *(["--json"] if as_json else []), "--device", "tpu")
    assert status == 1
    assert err.startswith("embert: error: ")
    assert "'tpu'" in err
    assert "30522" in out
    if as_json:
        facts = json.loads(out)
        assert facts["vocabulary"] == 30522
        assert "'tpu'" in facts["error"]


# --- the rest ---


def test_the_package_is_the_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "embert", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"embert {__version__}\n"


def test_a_reader_that_leaves_is_not_an_error() -> None:
    lines = "".join(f"text {i}\n" for i in range(3000))
    command = f"{sys.executable} -m embert.server.cli.main embed -q -f - {' '.join(STAND_IN)} | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", command], input=lines, text=True, cwd=ROOT, env=environment(), capture_output=True, check=False
    )
    assert json.loads(ended.stdout)["text"] == "text 0"
    assert ended.stderr == ""


@pytest.mark.parametrize("command", [("embed", "-q", "a text", *STAND_IN), ("info", *STAND_IN)])
def test_standard_output_on_a_full_disk(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "embert", *command], cwd=ROOT, env=environment(), stdout=full, stderr=-1, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr.decode().startswith("embert: error: standard output cannot be written")
    assert ended.stderr.count(b"\n") == 1


# --- options, environment, defaults ---


def test_typed_wins_over_environment_wins_over_default() -> None:
    environment = {"EMBERT_PORT": "1000", "EMBERT_MODEL": "there", "EMBERT_REQUEST_TIMEOUT": "7.5", "EMBERT_HOST": ""}
    config = parse_serve(["here", "--port", "2000"], environment)
    assert (config.model, config.port, config.request_timeout, config.host) == (("here",), 2000, 7.5, "0.0.0.0")
    assert parse_serve([], environment).model == ("there",)


@pytest.mark.parametrize("text", ["1", "true", "YES", "On"])
def test_switches(text: str) -> None:
    assert parse_serve([], {"EMBERT_AUTO_TRUNCATE": text}).auto_truncate is True
    assert parse_serve(["--no-auto-truncate"], {"EMBERT_AUTO_TRUNCATE": text}).auto_truncate is False
    assert parse_serve([], {"EMBERT_AUTO_TRUNCATE": "off"}).auto_truncate is False
    assert parse_serve(["--auto-truncate"], {"EMBERT_AUTO_TRUNCATE": "0"}).auto_truncate is True


def test_repeatable() -> None:
    assert parse_serve(["--api-key", "a", "--api-key", "b,c"], {}).api_key == ("a", "b,c")
    assert parse_serve([], {"EMBERT_API_KEY": "a, b,"}).api_key == ("a", "b")
    assert parse_serve(["--api-key", "typed"], {"EMBERT_API_KEY": "a"}).api_key == ("typed",)


@pytest.mark.parametrize("value", ["", "\n", " ", ",", ", ,\t"])
@pytest.mark.parametrize("name", ["EMBERT_API_KEY", "EMBERT_API_KEY_FILE", "EMBERT_KEYLESS"])
def test_a_blank_key_opens_no_server(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if (name, value) == ("EMBERT_KEYLESS", ""):
        assert parse_serve([], {name: value}) == parse_serve([], {})
        return
    with pytest.raises(ConfigError, match="(?i)" + name.removeprefix("EMBERT_").replace("_", ".")) as error:
        read_api_keys(parse_serve([], {name: value}))
    assert "blank" in str(error.value) or "no value" in str(error.value) or "cannot be read" in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"port": 65536}, "--port must be 0 to 65535; it is 65536"),
        ({"max_batch_tokens": 0}, "--max-batch-tokens must be at least 1; it is 0"),
        ({"drain_timeout": -1.0}, "--drain-timeout must be at least 0.0; it is -1.0"),
        ({"request_timeout": float("inf")}, "--request-timeout must be a finite number; it is inf"),
        ({"log_format": "xml"}, "--log-format must be one of text, json; it is 'xml'"),
        ({"api_key": ("good", "")}, "--api-key must not be blank"),
        ({"api_key": (" \n",)}, "--api-key must not be blank"),
        ({"api_key_file": ""}, "--api-key-file must not be blank"),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile, which was not given"),
        ({"ssl_ca_certs": "a"}, "--ssl-ca-certs needs --ssl-certfile, which was not given"),
        ({"timeout_keep_alive": 0.0}, "--timeout-keep-alive must be at least 1.0; it is 0.0"),
        ({"keyless": ("all",)}, "--keyless must be one of probes, page, metrics, docs, none; it is 'all'"),
        ({"keyless": ("none", "docs")}, "--keyless none cannot be combined with other values; it is none, docs"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServeConfig(**values)
    assert str(error.value) == said


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "http://localhost:3000",
        "https://a-b.example.com",
        "http://[::1]:8000",
        "chrome-extension://abcdefghijklmnop",
        "tauri://localhost",
        "http://example.com:443",
    ],
)
def test_origins_that_browsers_send(origin: str) -> None:
    assert ServeConfig(cors_allow_origin=(origin,)).cors_allow_origin == (origin,)


@pytest.mark.parametrize(
    ("origin", "meant"),
    [
        ("http://localhost:3000/", "http://localhost:3000"),
        ("https://Example.com/app?x#y", "https://example.com"),
        ("HTTP://example.com:80", "http://example.com"),
        ("https://example.com:443", "https://example.com"),
        ("http://localhost:*", ""),
        ("https://*.example.com", ""),
        ("example.com", ""),
        ("http://user@example.com", ""),
        ("http://a.com,http://b.com", ""),
        (" http://a.com", ""),
        ("http://a.com:", ""),
        ("http://münchen.de", ""),
        ("", ""),
    ],
)
def test_origins_that_no_browser_sends_are_refused(origin: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="--cors-allow-origin") as error:
        ServeConfig(cors_allow_origin=("https://example.com", origin))
    assert repr(origin) in str(error.value)
    assert ("did you mean" in str(error.value), meant in str(error.value)) == (bool(meant), True)


def test_a_key_in_the_environment_is_not_repeated_in_an_error() -> None:
    for variable, shown in (("EMBERT_WORKERS", "'s3cret'"), ("EMBERT_REQUEST_TIMEOUT", "'s3cret'")):
        with pytest.raises(ConfigError) as error:
            parse_serve([], {variable: "s3cret"})
        assert shown in str(error.value)
        assert variable in str(error.value)
    with pytest.raises(ConfigError) as error:
        read_api_keys(ServeConfig(api_key=("s3cret",), api_key_file="/nonexistent"))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EMBERT_MAX_BATCH_TOKEN", "EMBERT_MAX_BATCH_TOKENS"),
        ("EMBERT_BATCH_TOKENS", "EMBERT_MAX_BATCH_TOKENS"),
        ("EMBERT_REQUEST_TIME_OUT", "EMBERT_REQUEST_TIMEOUT"),
        ("EMBERT_APIKEY", "EMBERT_API_KEY"),
        ("EMBERT_XYZZY_JKQ", "serve --help"),
    ],
)
def test_unknown_variables_are_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not an option") as error:
        parse_serve([], {name: "s3cret"})
    assert meant in str(error.value)
    assert "s3cret" not in str(error.value)


def test_service_links_of_kubernetes_are_not_options() -> None:
    links = {
        "EMBERT_SERVICE_HOST": "10.0.0.1",
        "EMBERT_SERVICE_PORT_HTTP": "80",
        "EMBERT_PORT_80_TCP_ADDR": "10.0.0.1",
        "EMBERT_RERANKER_SERVICE_HOST": "10.0.0.2",
        "EMBERT_RERANKER_PORT": "tcp://10.0.0.2:80",
        "EMBERT_RERANKER_PORT_80_TCP": "tcp://10.0.0.2:80",
    }
    assert parse_serve([], links) == ServeConfig()
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        parse_serve([], links | {"EMBERT_PORT": "tcp://10.0.0.1:80"})
