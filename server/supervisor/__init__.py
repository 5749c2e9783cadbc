"""The `embert serve` process: opens the port, starts the other processes, watches them and ends them in order."""
