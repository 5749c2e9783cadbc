"""Measurements of the encoder and of the server, rivals in the same run; each prints a table and writes its JSON."""
