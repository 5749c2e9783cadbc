"""Other projects' clients, as docs/clients.md shows them, against the real server. Run by scripts/test-clients."""
