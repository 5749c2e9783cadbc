"""`python -m embert.ray.server_process`: `embert serve` for one replica of Ray Serve, on a port of the loopback.

stdin    the options, a ServeConfig as one line of JSON; its end means that the replica has ended, and ends the server
stdout   the port, on a line
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from io import FileIO

import msgspec

from embert.server.cli.serve import serve
from embert.server.config import ConfigError, ServeConfig
from embert.server.supervisor.sockets import listen


def main() -> None:
    """Runs the server. Raises SystemExit with the status of `embert serve`."""
    replica = FileIO(sys.stdin.fileno(), closefd=False)  # without a buffer, whose lock a thread would hold at the end
    config = msgspec.json.decode(replica.readline(), type=ServeConfig)
    threading.Thread(target=_end_with, args=(replica,), name="replica", daemon=True).start()
    try:
        sockets = listen("127.0.0.1", 0)
        sys.stdout.write(f"{sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        raise SystemExit(serve(config, sockets))
    except ConfigError as error:
        sys.stderr.write(f"embert: error: {error}\n")
        raise SystemExit(2) from None


def _end_with(replica: FileIO) -> None:
    """Drains and ends once the replica has closed the pipe, also by being killed."""
    replica.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
