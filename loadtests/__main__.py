"""`python -m loadtests SCENARIO [--host URL] [--seconds 60] [--report FOLDER] [options of locust and of the scenario]`.

Without --host it starts a server with the default model, for `rerank` with a cross-encoder of random weights, and stops
it at the end. The report (HTML, CSV) goes to build/load/SCENARIO. The exit status is 0 when all thresholds were kept, 1
when one was exceeded, and 2 when locust itself was the limit, so that nothing is known.
`locust -f loadtests/SCENARIO.py --host URL` does the same without the defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.lib.random_model import make_reranker
from benchmarks.lib.running_server import embert
from embert.engine import load_model

FOLDER = Path(__file__).parent
SCENARIOS = {"queries": 4, "passages": 4, "rerank": 4, "mixed": 5, "spike": 1, "soak": 8}  # and their locust users


def main(argv: Sequence[str] | None = None) -> None:
    """Run one scenario; ends with SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--host", help="a running server; default: start one")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--users", type=int, help="locust users")
    parser.add_argument("--report", type=Path, help="folder for the HTML and CSV files")
    parser.add_argument("--serve-options", default="", help="options for `embert serve`, as one string")
    options, more = parser.parse_known_args(argv)
    folder = options.report or FOLDER.parent / "build" / "load" / options.scenario
    folder.mkdir(parents=True, exist_ok=True)
    users = str(options.users or SCENARIOS[options.scenario])
    with contextlib.ExitStack() as stack:
        host = options.host
        if host is None:
            model = _reranker(Path(stack.enter_context(TemporaryDirectory()))) if options.scenario == "rerank" else None
            server = stack.enter_context(embert(*shlex.split(options.serve_options), model=model))
            host = f"http://127.0.0.1:{server.port}"
        command = [sys.executable, "-m", "locust", "--locustfile", str(FOLDER / f"{options.scenario}.py"), "--headless"]
        command += ["--host", host, "--users", users, "--spawn-rate", users, "--run-time", f"{options.seconds:g}s"]
        command += ["--stop-timeout", "15", "--only-summary", "--html", str(folder / "report.html")]
        command += ["--csv", str(folder / "report"), "--csv-full-history", *more]
        status = subprocess.run(command, cwd=FOLDER.parent, check=False).returncode
    print(f"report: {folder / 'report.html'}")
    raise SystemExit(status)


def _reranker(folder: Path) -> str:
    return str(make_reranker(folder, load_model().transformer_folder))


if __name__ == "__main__":
    main()
