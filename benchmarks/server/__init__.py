"""The server over HTTP: its throughput and latency next to other servers, and what it costs itself."""
