"""Measurements: the encoder against its rivals, the server against its rivals. Each prints a table and writes a JSON of it."""
