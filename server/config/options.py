"""Every option of `embert serve`. The command line, the environment variables and the tests of the docs use this."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embert.engine.host import usable_cpus, visible_gpus
from embert.engine.quantization import MIN_ACCURACY

_PREFIX = "EMBERT_"
HELD_BYTES, HELD_BODIES = 256_000_000, 8  # default of --max-held-bytes: the larger of 256 MB and 8 bodies
QUEUE_BATCHES = 256  # default of --max-queue-tokens, in full batches of each engine
MAX_RESPONSE_TOKENS = 131_072  # of one response of /tokenize or /decode
MAX_RESPONSE_WEIGHTS = 2_097_152  # of the sparse vectors, or scores of labels, of one response
GPU_WORKERS = 12  # HTTP processes that keep one GPU busy with short texts; more change nothing


# In a comment, so that no key can be taken for a name, and so that older versions read the file as well.
_KEY_NAME = re.compile(r"#\s*name:\s*([\w.-]{1,64})")
_KEY_ENDS = " \t\r\n"  # stripped from keys: a header field cannot have them at its ends
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # not allowed in a header field
KEY_FILE_LIMIT = 1 << 20  # bytes


class ConfigError(Exception):
    """The value of an option is invalid; the message names the option, the value and what is allowed."""


def _option(default: Any, help: str, **extra: Any) -> Any:  # noqa: A002 - argparse's word
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of `embert serve`, checked, the same in every process. Tuples are repeatable options."""

    model: tuple[str, ...] = _option(
        (),
        "a local folder or a hub id, or several, each as MODEL or NAME=MODEL; without it, the packaged "
        "all-MiniLM-L6-v2",
        positional=True,
    )
    config: str | None = _option(None, "TOML file that lists the models and the options of each, in place of MODEL")
    revision: str | None = _option(None, "branch, tag or commit of the hub id; with one model")
    served_model_name: str | None = _option(
        None, "name that clients use for the model; default: the model id; with one model"
    )
    host: str = _option("0.0.0.0", "address to listen on; :: is IPv6 and IPv4")  # noqa: S104 - a server in a container
    port: int = _option(8080, "port to listen on; 0 takes a free one", low=0, high=65535)
    device: str = _option("auto", "auto, cpu, cuda, cuda:0, or cuda:0,1")
    dtype: str = _option(
        "auto", "number format of the encoder's arithmetic", choices=("auto", "float32", "float16", "bfloat16", "int8")
    )
    min_agreement: float = _option(
        MIN_ACCURACY,
        "least cosine between vectors of --dtype int8 and of the usual number format; a model below it is refused",
        low=0.0,
        high=1.0,
        metavar="COSINE",
    )
    encoder: str = _option("auto", "auto, cuda, cuda-portable, cpu, torch, or package.module:factory of your own")
    pooling: str | None = _option(
        None, "pooling that replaces the model's own", choices=("cls", "mean", "max", "last-token", "splade")
    )
    default_prompt_name: str | None = _option(
        None, "name of the model's prompt that precedes the texts of a request without one"
    )
    default_prompt: str | None = _option(None, "text of the prompt that precedes the texts of a request without one")
    max_batch_tokens: int | None = _option(None, "token budget of one batch; default: the encoder's own", low=1)
    max_queue_tokens: int | None = _option(
        None, "maximum tokens of requests without a response, then 429; default: 256 batches for each engine", low=1
    )
    max_queue_seconds: float = _option(
        10.0,
        "maximum seconds of work of requests without a response, at the measured rate, then 429; 0: no limit",
        low=0.0,
    )
    max_client_batch_size: int = _option(2048, "maximum texts in one request, then 413", low=1)
    max_client_documents: int = _option(
        10_000, "maximum documents, or pairs of texts, of one request that reranks or scores, then 413", low=1
    )
    payload_limit: int = _option(10_000_000, "maximum bytes of a request body, then 413", low=1)
    max_held_bytes: int | None = _option(
        None,
        "maximum bytes of bodies and of responses that one HTTP process holds, then 503; default: 256000000 or 8 times "
        "--payload-limit, whichever is larger",
        low=1,
    )
    max_client_batch_tokens: int | None = _option(
        None, "maximum tokens in one request, then 413; default: only texts limit a request", low=1
    )
    max_connections: int = _option(16_384, "maximum connections of each HTTP process, then 503", low=1)
    openai_accepts: tuple[str, ...] = _option(
        (),
        "additions to OpenAI's routes: token-ids accepts token ids in requests that name this model, as TEI's routes "
        "always do; any-model accepts any name of a model, and the header x-model has the name of the one used",
        choices=("token-ids", "any-model"),
    )
    auto_truncate: bool = _option(
        True, "truncate texts that are too long for the model, unless the request says otherwise"
    )
    request_timeout: float = _option(60.0, "maximum seconds of a request, then 503", low=0.001)
    engine_timeout: float | None = _option(
        None,
        "maximum seconds of one forward; then the engine counts as hung and is replaced; default: 30, or three times "
        "the time of the longest text",
        low=1.0,
    )
    start_timeout: float = _option(
        600.0, "maximum seconds until a process is ready; then it is killed and started again", low=1.0
    )
    client_timeout: float = _option(
        30.0, "maximum seconds that a client may pause while it sends its body or reads its response", low=0.1
    )
    timeout_keep_alive: float = _option(75.0, "seconds after which a connection without a request is closed", low=1.0)
    drain_timeout: float = _option(30.0, "seconds that requests in flight have to finish after SIGTERM", low=0.0)
    workers: int = _option(
        0,
        "HTTP processes; 0: with a GPU three quarters of the CPUs, at most 12 for each GPU; else a quarter, "
        "at most 4; at least 1",
        low=0,
        high=256,
    )
    tokenization_workers: int = _option(0, "threads of each HTTP process that tokenize; 0: two", low=0, high=256)
    api_key: tuple[str, ...] = _option(
        (), "key that clients must send as `Authorization: Bearer KEY`", secret=True, guards=True
    )
    api_key_file: str | None = _option(None, "file of keys, one in each line; read again when it changes", guards=True)
    keyless: tuple[str, ...] = _option(
        ("probes", "page"),
        "routes that need no key if there are keys; probes need one only with none",
        choices=("probes", "page", "metrics", "docs", "none"),
    )
    cors_allow_origin: tuple[str, ...] = _option(
        (), "origin from which browsers may send requests, such as https://example.com; * for all"
    )
    metrics_port: int | None = _option(None, "serve /metrics on this port too, without a key", low=0, high=65535)
    otlp_endpoint: str | None = _option(
        None, "URL of an OpenTelemetry collector that accepts traces over OTLP/HTTP, such as http://collector:4318"
    )
    log_format: str = _option("text", "format of log lines", choices=("text", "json"))
    access_log: str = _option("off", "log a line for each request", choices=("off", "text", "json"))
    log_level: str = _option("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))
    ssl_keyfile: str | None = _option(None, "file of the TLS private key; default: the file of the certificate")
    ssl_certfile: str | None = _option(None, "file of the TLS certificate chain")
    ssl_ca_certs: str | None = _option(
        None,
        "file of CA certificates; each client then needs a certificate that one of them has signed",
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            for value in _each(getattr(self, option.name)):
                _check(option, value)
        for origin in self.cors_allow_origin:
            _check_origin(origin)
        self._check_tls()
        if len(self.keyless) > 1 and "none" in self.keyless:
            raise ConfigError(f"--keyless none cannot be combined with other values; it is {', '.join(self.keyless)}")
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ConfigError("--default-prompt and --default-prompt-name exclude each other; both were given")
        if self.held_limit < self.payload_limit:
            raise ConfigError(
                f"--max-held-bytes must be at least --payload-limit, which is {self.payload_limit}; "
                f"it is {self.max_held_bytes}"
            )

    def _check_tls(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{option_name(name)} needs --ssl-certfile, which was not given")

    @property
    def keyless_groups(self) -> tuple[str, ...]:
        """`keyless` and the probes: an orchestrator sends no key."""
        return () if self.keyless == ("none",) else ("probes", *self.keyless)

    def served_name(self, model_id: str) -> str:
        """Returns the name of a model for clients and metrics."""
        return self.served_model_name or model_id

    @property
    def http_processes(self) -> int:
        """`workers`, with 0 resolved for this machine."""
        return self.workers or max(1, self._most_workers())

    def _most_workers(self) -> int:
        cpus, numbers = usable_cpus(), self.device.partition(":")[2]
        on_cpu = self.device == "cpu" or self.encoder in ("cpu", "torch")
        gpus = 0 if on_cpu else len(numbers.split(",")) if numbers else visible_gpus()
        return min(GPU_WORKERS * gpus, (cpus * 3 + 3) // 4) if gpus else min(4, cpus // 4)

    def queue_budget(self, max_batch_tokens: int, engines: int) -> int:
        """Returns `max_queue_tokens`, with the default resolved for this number of engines."""
        return self.max_queue_tokens or QUEUE_BATCHES * max_batch_tokens * engines

    @property
    def held_limit(self) -> int:
        """`max_held_bytes`, with the default resolved."""
        return self.max_held_bytes or max(HELD_BYTES, HELD_BODIES * self.payload_limit)

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
    if (limits.get("secret") or limits.get("guards")) and not value.strip():
        raise ConfigError(f"{name} must not be blank")


# An origin in a header of a browser: nothing after the port, no capitals, no default port. Files and sandboxes: `null`.
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?", re.ASCII)
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def _is_origin(text: str) -> bool:
    match = _ORIGIN.fullmatch(text)
    return text in ("*", "null") or (match is not None and (match[3] is None or _USUAL_PORTS.get(match[1]) != match[3]))


def _check_origin(origin: str) -> None:
    """Raises ConfigError for a value that no browser sends and that would allow nothing."""
    if _is_origin(origin):
        return
    scheme, slashes, rest = origin.lower().partition("://")
    host = re.split("[/?#]", rest)[0].removesuffix(_USUAL_PORTS.get(scheme, "none"))
    suggestion = scheme + slashes + host
    hint = f"; did you mean {suggestion}?" if _is_origin(suggestion) else ""
    raise ConfigError(
        "--cors-allow-origin must be an origin as browsers send it, such as http://localhost:3000, or * for all; "
        f"it is {origin!r}, which matches none{hint}"
    )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and its name in the access log."""

    name: str
    key: str = field(repr=False)


def read_api_keys(config: ServeConfig) -> list[ApiKey]:
    """Returns all keys, with those of --api-key-file. Raises ConfigError for a file that cannot be read or has no key.

    In the file, a comment `# name: NAME` names the key below it. Other keys are named by index: option-1, file-1.
    """
    keys = [_api_key(f"option-{i}", key, f"--api-key number {i}") for i, key in enumerate(config.api_key, 1)]
    path = config.api_key_file
    if path is not None:
        try:
            text = _read_key_file(path).decode("utf-8-sig")  # some editors write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
        file_keys: list[ApiKey] = []
        name = ""
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would divide keys at U+2028 and U+0085
            entry = line.strip(_KEY_ENDS)
            if match := _KEY_NAME.fullmatch(entry):
                name = match[1]
            elif entry and not entry.startswith("#"):
                file_keys.append(
                    _api_key(name or f"file-{len(file_keys) + 1}", line, f"--api-key-file {path}: line {number}")
                )
                name = ""
        if not file_keys:
            raise ConfigError(f"--api-key-file {path} holds no key")
        keys += file_keys
    return keys


def _api_key(name: str, text: str, source: str) -> ApiKey:
    key = text.strip(_KEY_ENDS)
    if control := _CONTROL.search(key):
        raise ConfigError(f"{source} has the control character {control[0]!r} in it, which no header can carry")
    return ApiKey(name, key)


def _read_key_file(path: str) -> bytes:
    """Returns the content. Raises OSError; also if it is not a regular file: reading a FIFO or device may never end."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        metadata = os.fstat(file.fileno())
        if not stat.S_ISREG(metadata.st_mode):
            raise OSError("it is not a regular file")
        if metadata.st_size > KEY_FILE_LIMIT:
            raise OSError(f"it has {metadata.st_size} bytes; the limit is {KEY_FILE_LIMIT}")
        return file.read(KEY_FILE_LIMIT)


def _no_password() -> str:
    raise ssl.SSLError("the private key is encrypted; the server reads only keys without a password")


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Returns None without --ssl-certfile. Raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    options = [f"--ssl-certfile {config.ssl_certfile}"]
    options += [f"--ssl-keyfile {config.ssl_keyfile}"] if config.ssl_keyfile else []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this function OpenSSL would read a password from the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
        if config.ssl_ca_certs is not None:
            options = [f"--ssl-ca-certs {config.ssl_ca_certs}"]
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{' with '.join(options)}: {error}") from None
    return context


def option_name(name: str) -> str:
    """Returns the option of a field: `max_batch_tokens` is `--max-batch-tokens`."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """Returns the environment variable of a field: `max_batch_tokens` is `EMBERT_MAX_BATCH_TOKENS`."""
    return _PREFIX + name.upper()


# Variables that Kubernetes sets for a service named `embert` or `embert-…`, and Docker for a linked container.
_SERVICE_LINK = re.compile(r"EMBERT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
# Variables of the image's scripts, of the build and of the tests, which may be set when a server starts.
_OTHERS = ("EMBERT_CUDA", "EMBERT_CPU", "EMBERT_CPU_ISA", "EMBERT_CUDA_ARCHITECTURES", "EMBERT_PREFIX", "EMBERT_WHEELS",
           "EMBERT_MODEL_FOLDER", "EMBERT_VENV", "EMBERT_CONSTRAINTS", "EMBERT_COVERAGE")  # fmt: skip


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for an EMBERT_ variable that is not an option: a misspelt one would have no effect."""
    known = environment_names()
    if _LINK_URL.match(port := environment.get("EMBERT_PORT", "")):
        raise ConfigError(
            f"EMBERT_PORT is {port}, which Kubernetes sets for a service named embert; the pod needs "
            "`enableServiceLinks: false`"
        )
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known or name in _OTHERS or name.startswith("EMBERT_TEST"):
            continue
        if _SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and _LINK_URL.match(environment[name])):
            continue
        options = [option.removeprefix(_PREFIX) for option in known]
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), options, 1)
        hint = f"did you mean {_PREFIX}{near[0]}?" if near else "`embert serve --help` lists them"
        raise ConfigError(f"{name} is not an option of `embert serve`; {hint}")


def environment_names() -> list[str]:
    """Returns the variables of all options, in their order."""
    return [environment_name(option.name) for option in dataclasses.fields(ServeConfig)]
