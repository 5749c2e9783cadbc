"""The CUDA encoder on a GPU: its vectors compared with those of transformers, and the properties that it guarantees."""
