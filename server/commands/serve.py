"""`embert serve`: everything that can be known to be wrong is said here, before a process is started."""

from __future__ import annotations

import logging
import signal
import ssl
import sys
import time

from embert import __version__
from embert.engine import Model, load_model
from embert.engine.devices import devices
from embert.engine.errors import ModelError
from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.observability.logs import configure_logging, leave
from embert.server.supervisor.supervisor import Supervisor, listen, listen_for_each

__all__ = ["serve"]

log = logging.getLogger(__name__)


def serve(config: ServeConfig) -> int:
    """Run the server until it is told to stop; returns the exit status."""
    began = time.monotonic()
    configure_logging("supervisor", config.log_format, config.log_level)
    # Process 1 of a container has no default for it, and bringing a model takes minutes; the supervisor has its own.
    signal.signal(signal.SIGTERM, _leave)
    _check_tls(config)
    read_api_keys(config)
    sockets = listen_for_each(config.host, config.port, config.http_processes)
    metrics_socket = None
    if config.metrics_port is not None:
        metrics_socket = listen(config.host, config.metrics_port, "--metrics-port")[0]
    log.info("embert   %s", __version__)
    try:
        model = load_model(config.model, revision=config.revision, pooling=config.pooling, progress=sys.stderr.isatty())
    except ModelError as error:
        log.error("%s", error)  # noqa: TRY400 - the sentence is for users, the traceback is not
        return 1
    _check_model(config, model)
    architecture = model.architecture
    log.info(
        "model    %s (%s, %d layers, hidden size %d, %s pooling, %d dimensions, up to %d tokens)",
        model.model_id,
        architecture.family,
        architecture.layers,
        architecture.hidden_size,
        model.pooling,
        model.width,
        model.max_input_length,
    )
    for notice in model.notices:
        log.warning("%s", notice)
    return Supervisor(config, model, devices(config.device, config.encoder), sockets, metrics_socket, began).run()


def _leave(number: int, frame: object) -> None:
    """End at once: nothing has been started yet."""
    del frame
    log.info("%s before the model was there: leaving", signal.Signals(number).name)
    leave(128 + number)  # threads of a download would be waited for


def _check_tls(config: ServeConfig) -> None:
    if config.ssl_certfile is None:
        return
    options = [f"--ssl-certfile {config.ssl_certfile}"]
    options += [f"--ssl-keyfile {config.ssl_keyfile}"] if config.ssl_keyfile else []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password or "")
        if config.ssl_ca_certs is not None:
            options = [f"--ssl-ca-certs {config.ssl_ca_certs}"]
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers is not None:
            options = [f"--ssl-ciphers {config.ssl_ciphers}"]
            context.set_ciphers(config.ssl_ciphers)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{' with '.join(options)}: {error}") from None


def _check_model(config: ServeConfig, model: Model) -> None:
    """What the options and the model must agree on."""
    longest = model.max_input_length
    if config.max_batch_tokens is not None and config.max_batch_tokens < longest:
        raise ConfigError(
            f"--max-batch-tokens {config.max_batch_tokens} is below the {longest} tokens that one text may have"
        )
    name = config.default_prompt_name
    if name is not None and name not in model.prompts:
        known = ", ".join(sorted(model.prompts)) or "none"
        raise ConfigError(f"--default-prompt-name {name!r} is not one of the model's prompts ({known})")
