"""Listening sockets: opened by the supervisor, shared by the HTTP processes, and kept open while those restart."""

from __future__ import annotations

import os
import socket

from embert.server.config import ConfigError

_BACKLOG = 4096


def listen(host: str, port: int, option: str = "--port") -> list[socket.socket]:
    """Opens the port on every address of `host`, on `::` for IPv4 too.

    The sockets can be inherited and do not block: processes that share one may accept at the same moment. Raises
    ConfigError with one sentence that names `option`.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from None
    sockets: list[socket.socket] = []
    for family, *_, address in dict.fromkeys(addresses):
        address = address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]
        try:
            # For any default of the system, an IPv6 socket takes IPv4 exactly if the host is `::`.
            sock = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::")
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another with {option}") from None
        sock.set_inheritable(True)
        sock.setblocking(False)
        sockets.append(sock)
    return sockets
