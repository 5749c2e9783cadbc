"""The `embert serve` process: opens the port, starts and watches the others."""
