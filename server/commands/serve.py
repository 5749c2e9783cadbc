"""`embert serve`: reports every error that can be found before a process is started, then runs the supervisor."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import time

from embert import __version__
from embert.server.commands.models import plan
from embert.server.config import ConfigError, ServeConfig, model_configs, read_api_keys
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.supervisor.sockets import listen, listen_for_each
from embert.server.supervisor.supervisor import Supervisor

__all__ = ["serve"]

log = logging.getLogger(__name__)


def serve(config: ServeConfig, sockets: list[list[socket.socket]] | None = None) -> int:
    """Run the server until it is told to stop; returns the exit status.

    `sockets` are those of each HTTP process where they listen already, in place of --host and --port.
    """
    began = time.monotonic()
    configure_logging("supervisor", config.log_format, config.log_level)
    # Process 1 of a container ignores SIGTERM by default, and a model takes minutes to download. The supervisor later
    # installs its own handler.
    signal.signal(signal.SIGTERM, _on_sigterm)
    _check_tls(config)
    read_api_keys(config)
    configs = model_configs(config)
    sockets = sockets or listen_for_each(config.host, config.port, config.http_processes)
    metrics_socket = None
    if config.metrics_port is not None:
        metrics_socket = listen(config.host, config.metrics_port, "--metrics-port")[0]
    log.info("embert   %s", __version__)
    planned, broken = plan(configs)
    if not planned:
        return 1
    return Supervisor(config, planned, broken, sockets, metrics_socket, began).run()


def _on_sigterm(number: int, frame: object) -> None:
    """Exit at once: no process has been started yet."""
    del frame
    log.info("%s before the model was there: leaving", signal.Signals(number).name)
    exit_now(128 + number)  # SystemExit would wait for the threads of a download


def _check_tls(config: ServeConfig) -> None:
    if config.ssl_certfile is None:
        return
    options = [f"--ssl-certfile {config.ssl_certfile}"]
    options += [f"--ssl-keyfile {config.ssl_keyfile}"] if config.ssl_keyfile else []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password or "")
        if config.ssl_ca_certs is not None:
            options = [f"--ssl-ca-certs {config.ssl_ca_certs}"]
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers is not None:
            options = [f"--ssl-ciphers {config.ssl_ciphers}"]
            context.set_ciphers(config.ssl_ciphers)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{' with '.join(options)}: {error}") from None
