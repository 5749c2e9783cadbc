"""Every option of `embert serve`, once: the command line, the environment and the documentation are made from this."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LATENCY_BUCKETS_S", "ConfigError", "ServeConfig", "environment_name", "option_name", "read_api_keys"]

LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

BODY_BUDGET = 8  # default of --max-body-bytes, in bodies of --payload-limit
QUEUE_BATCHES = 64  # default of --max-queue-tokens, in full batches of each engine


class ConfigError(Exception):
    """An option's value cannot be used; the message names option, value and what is allowed."""


def _option(default: Any, help: str, **extra: Any) -> Any:  # noqa: A002 - argparse's word
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What `embert serve` was asked for, checked, and the same in every process. Tuples are repeatable options."""

    model: str | None = _option(
        None, "a local folder or a hub id; without it, the packaged all-MiniLM-L6-v2", positional=True
    )
    revision: str | None = _option(None, "branch, tag or commit of the hub id")
    served_model_name: str | None = _option(None, "the name clients use for the model; default: the model id")
    host: str = _option("0.0.0.0", "address to listen on")  # noqa: S104 - a server in a container
    port: int = _option(8080, "port to listen on; 0 takes a free one", low=0, high=65535)
    device: str = _option("auto", "auto, cpu, cuda, cuda:0, or cuda:0,1")
    dtype: str = _option("auto", "what the encoder computes in", choices=("auto", "float32", "float16", "bfloat16"))
    encoder: str = _option("auto", "auto, cuda, cuda-portable, torch, or package.module:factory of your own")
    pooling: str | None = _option(None, "override the model's own", choices=("cls", "mean", "max", "last-token"))
    default_prompt_name: str | None = _option(None, "the prompt of the model put before every text that names none")
    default_prompt: str | None = _option(None, "a prompt text put before every text that names none")
    max_batch_tokens: int | None = _option(None, "token budget of one batch; default: the encoder's own", low=1)
    max_batch_requests: int | None = _option(None, "most texts in one batch; default: no limit but the tokens", low=1)
    max_queue_tokens: int | None = _option(
        None, "tokens admitted and not yet answered before 429; default: 64 batches for each engine", low=1
    )
    max_queue_seconds: float = _option(
        10.0, "seconds of work admitted and not yet answered before 429, at the measured rate; 0 for no limit", low=0.0
    )
    max_client_batch_size: int = _option(2048, "most texts in one request before 413", low=1)
    payload_limit: int = _option(10_000_000, "largest request body in bytes before 413", low=1)
    max_body_bytes: int | None = _option(
        None, "bytes of all bodies that one HTTP process is reading before 503; default: 8 times --payload-limit", low=1
    )
    max_client_batch_tokens: int | None = _option(
        None, "most tokens in one request before 413; default: no limit but the texts", low=1
    )
    header_limit: int = _option(65_536, "largest request line and headers in bytes before 431", low=256)
    max_connections: int = _option(16_384, "connections of each HTTP process before 503", low=1)
    max_unbroken_characters: int = _option(
        131_072, "most characters of a text without a place to divide it for tokenising, before 413", low=1
    )
    max_answer_tokens: int = _option(131_072, "most tokens of one answer of /tokenize or /decode before 413", low=1)
    accept_token_ids: bool = _option(
        False, "take token ids on OpenAI's routes too, in requests that name this model; TEI's routes always do"
    )
    auto_truncate: bool = _option(True, "cut texts longer than the model reads when the request does not say")
    request_timeout: float = _option(60.0, "seconds a request may take before 503", low=0.001)
    engine_timeout: float = _option(
        30.0, "most seconds of one forward before the engine counts as hung and is replaced", low=1.0
    )
    start_timeout: float = _option(
        600.0, "most seconds that a process may take to be ready before it is ended", low=1.0
    )
    give_up_after: float = _option(
        300.0,
        "seconds without an engine or an HTTP process that works before the server exits 1; 0 for never",
        low=0.0,
    )
    client_timeout: float = _option(
        30.0, "seconds that a client may leave us waiting for more of its body, or its answer unread", low=0.1
    )
    drain_timeout: float = _option(30.0, "seconds that requests in flight get after SIGTERM", low=0.0)
    workers: int = _option(
        0, "HTTP processes; 0 means one for every four cores, at least 1, at most 4", low=0, high=256
    )
    tokenization_workers: int = _option(0, "tokenising threads of an HTTP process; 0 means two", low=0, high=256)
    api_key: tuple[str, ...] = _option((), "a key that clients must send as `Authorization: Bearer KEY`", secret=True)
    api_key_file: str | None = _option(None, "a file of such keys, one a line; read again when it changes")
    keyless: tuple[str, ...] = _option(
        ("probes", "page"),
        "what is answered without a key where keys are set",
        choices=("probes", "page", "metrics", "docs", "none"),
    )
    cors_allow_origin: tuple[str, ...] = _option((), "an origin allowed to call from a browser; * for all")
    metrics_port: int | None = _option(None, "also serve /metrics on this port, without a key", low=0, high=65535)
    latency_buckets: tuple[float, ...] = _option(
        LATENCY_BUCKETS_S, "bucket bounds in seconds of the latency histograms"
    )
    log_format: str = _option("text", "how log lines are written", choices=("text", "json"))
    log_level: str = _option("info", "least severe level written", choices=("debug", "info", "warning", "error"))
    ssl_keyfile: str | None = _option(None, "TLS private key; default: in the file of the certificate")
    ssl_certfile: str | None = _option(None, "TLS certificate chain")
    ssl_keyfile_password: str | None = _option(None, "what the TLS private key is encrypted with", secret=True)
    ssl_ca_certs: str | None = _option(None, "certificates that those of clients must be signed with")
    ssl_cert_reqs: int = _option(0, "certificates of clients: 0 not asked for, 1 optional, 2 required", low=0, high=2)
    ssl_ciphers: str | None = _option(None, "TLS ciphers, in OpenSSL's notation; default: Python's")

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            for value in _each(getattr(self, option.name)):
                _check(option, value)
        self._check_tls()
        if len(self.keyless) > 1 and "none" in self.keyless:
            raise ConfigError(f"--keyless none stands alone; the values are {', '.join(self.keyless)}")
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ConfigError("--default-prompt and --default-prompt-name exclude each other; both were given")
        if self.body_budget < self.payload_limit:
            raise ConfigError(
                f"--max-body-bytes must be at least --payload-limit, which is {self.payload_limit}; "
                f"it is {self.max_body_bytes}"
            )
        if list(self.latency_buckets) != sorted(set(self.latency_buckets)):
            raise ConfigError(f"--latency-buckets must rise, but they are {list(self.latency_buckets)}")

    def _check_tls(self) -> None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{option_name(name)} needs --ssl-certfile, which was not given")
        if bool(self.ssl_cert_reqs) != bool(self.ssl_ca_certs):
            raise ConfigError("--ssl-ca-certs and --ssl-cert-reqs 1 or 2 go together; only one of them was given")

    @property
    def http_processes(self) -> int:
        """`workers`, with 0 resolved on this machine."""
        return self.workers or max(1, min(4, len(os.sched_getaffinity(0)) // 4))

    def queue_budget(self, max_batch_tokens: int, engines: int) -> int:
        """`max_queue_tokens`, with the default resolved for so many engines."""
        return self.max_queue_tokens or QUEUE_BATCHES * max_batch_tokens * engines

    @property
    def body_budget(self) -> int:
        """`max_body_bytes`, with the default resolved."""
        return self.max_body_bytes or BODY_BUDGET * self.payload_limit

    @property
    def tokenization_threads(self) -> int:
        """`tokenization_workers`, with 0 resolved."""
        return self.tokenization_workers or 2


def _each(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _check(option: dataclasses.Field[Any], value: Any) -> None:
    limits: Mapping[str, Any] = option.metadata
    name = option_name(option.name)
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(limits['choices'])}; it is {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number; it is {value}")
    if "low" in limits and not limits["low"] <= value <= limits.get("high", float("inf")):
        bounds = f"{limits['low']} to {limits['high']}" if "high" in limits else f"at least {limits['low']}"
        raise ConfigError(f"{name} must be {bounds}; it is {value}")
    if limits.get("secret") and not value:
        raise ConfigError(f"{name} must not be empty")


def read_api_keys(config: ServeConfig) -> list[str]:
    """All keys, those of --api-key-file included. Raises ConfigError when that cannot be used."""
    keys, path = list(config.api_key), config.api_key_file
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8-sig")  # an editor's byte order mark is no part of a key
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {path} holds no key")
        keys += found
    return keys


def option_name(name: str) -> str:
    """`max_batch_tokens` → `--max-batch-tokens`."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """`max_batch_tokens` → `EMBERT_MAX_BATCH_TOKENS`."""
    return "EMBERT_" + name.upper()
