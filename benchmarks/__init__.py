"""Measurements of the encoder and of the server next to their rivals. README.md lists the commands by question."""
