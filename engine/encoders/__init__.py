"""Encoders: packed token ids in, float32 rows out. One protocol, a CUDA encoder, a CPU encoder, and the choice."""
