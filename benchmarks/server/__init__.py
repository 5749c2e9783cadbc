"""The server over HTTP: its throughput and latency beside other servers, and what it costs itself."""
