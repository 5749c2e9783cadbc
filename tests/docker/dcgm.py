"""Stands in for NVIDIA's DCGM exporter on a machine without a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LABELS = (
    'gpu="0",UUID="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",pci_bus_id="00000000:01:00.0",device="nvidia0",'
    'modelName="NVIDIA H100 80GB HBM3",Hostname="gpu-host",DCGM_FI_DRIVER_VERSION="580.82.07"'
)
# Name and value; all are gauges. https://github.com/NVIDIA/dcgm-exporter, etc/dcp-metrics-included.csv
GAUGES = {
    "DCGM_FI_DEV_SM_CLOCK": 1980,
    "DCGM_FI_DEV_GPU_TEMP": 41,
    "DCGM_FI_DEV_POWER_USAGE": 318.4,
    "DCGM_FI_DEV_GPU_UTIL": 87,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_FI_DEV_FB_FREE": 60000,
    "DCGM_FI_DEV_FB_USED": 21559,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.871,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.402,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.312,
}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        lines = (
            f"# HELP {name} …\n# TYPE {name} gauge\n{name}{{{LABELS}}} {value}\n" for name, value in GAUGES.items()
        )
        body = "".join(lines).encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def dcgm_exporter() -> Iterator[str]:
    """Its address, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
