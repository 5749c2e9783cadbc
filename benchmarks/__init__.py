"""Measurements of the encoder and of the server beside their rivals. README.md says which command answers what."""
