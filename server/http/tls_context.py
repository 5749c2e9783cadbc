"""The TLS options as a context. Apart from tls.py, so that the command line can check them without importing HTTP."""

from __future__ import annotations

import ssl

from embert.server.config import ConfigError, ServeConfig

__all__ = ["tls_context"]


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """None without --ssl-certfile. Raises ConfigError for files and ciphers that cannot be used."""
    if config.ssl_certfile is None:
        return None
    options = [f"--ssl-certfile {config.ssl_certfile}"]
    options += [f"--ssl-keyfile {config.ssl_keyfile}"] if config.ssl_keyfile else []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password or "")
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            options = [f"--ssl-ca-certs {config.ssl_ca_certs}"]
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers is not None:
            options = [f"--ssl-ciphers {config.ssl_ciphers}"]
            context.set_ciphers(config.ssl_ciphers)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{' with '.join(options)}: {error}") from None
    return context
