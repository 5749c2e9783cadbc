"""Listening sockets: opened by the supervisor, shared by the HTTP processes, and kept open while those restart."""

from __future__ import annotations

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
            sock = _bind(family, address, both=host == "::")
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another with {option}"
            ) from None
        sockets.append(sock)
    return sockets


def _bind(family: int, address: tuple[object, ...], *, both: bool) -> socket.socket:
    """Returns a bound TCP socket. `both`: an IPv6 socket also takes IPv4, for any system default."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.set_inheritable(True)
    sock.setblocking(False)
    return sock
