"""A model's weights: tensors by BERT's names, merged with LoRA adapters, and low-rank adapters of requests."""
