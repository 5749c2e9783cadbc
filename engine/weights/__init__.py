"""A model's weights: tensors by BERT's names, merged with LoRA adapters, beside low-rank adapters of requests."""
