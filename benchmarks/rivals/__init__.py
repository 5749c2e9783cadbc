"""Alternatives to embert: kernels, encoders and servers."""
