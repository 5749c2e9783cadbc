"""The CUDA encoder on a GPU: its vectors beside those of transformers, and what it promises of them."""
