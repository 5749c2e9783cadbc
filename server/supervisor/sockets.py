"""Listening sockets: opened by the supervisor, inherited by the HTTP processes, and kept open while those restart."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from embert.server.config import ConfigError

__all__ = ["bind_beside", "listen", "listen_for_each"]

_BACKLOG = 4096


def listen(host: str, port: int, option: str = "--port", *, shared: bool = False) -> list[socket.socket]:
    """Open the port on every address that `host` stands for, on `::` for IPv4 too; `shared` sets SO_REUSEPORT.

    Raises ConfigError with one sentence that names `option`.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from None
    sockets: list[socket.socket] = []
    for family, *_, address in dict.fromkeys(addresses):
        wanted = address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]
        try:
            sock = _bound(family, wanted, shared=shared, both=host == "::")
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another with {option}"
            ) from None
        sockets.append(sock)
    return sockets


def bind_beside(siblings: Sequence[socket.socket]) -> list[socket.socket]:
    """Sockets with the addresses of those of another process, which get connections once a process listens on them.

    Raises OSError.
    """
    return [_bound(sock.family, sock.getsockname(), shared=True, both=not _is_ipv6_only(sock)) for sock in siblings]


def _bound(family: int, address: Any, *, shared: bool, both: bool) -> socket.socket:
    """An inheritable TCP socket; `both`: an IPv6 socket also takes IPv4, for any system default."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.set_inheritable(True)
    return sock


def _is_ipv6_only(sock: socket.socket) -> bool:
    return sock.family == socket.AF_INET6 and bool(sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))


def listen_for_each(host: str, port: int, processes: int) -> list[list[socket.socket]]:
    """Open the same port once for each process, so that the kernel spreads connections over the processes.

    If they shared one socket, the process that happens to be awake would accept most. Raises ConfigError like `listen`.
    """
    sockets = listen(host, port)  # not shared, so that it fails where another server uses the port
    if processes == 1:
        return [sockets]
    free_port: int = sockets[0].getsockname()[1]
    for sock in sockets:
        sock.close()
    return [listen(host, free_port, shared=True) for _ in range(processes)]
