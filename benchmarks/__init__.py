"""Measurements of the encoder and of the server next to their rivals. README.md says which command answers what."""
