"""The machine that this process runs on, as the kernel shows it."""
