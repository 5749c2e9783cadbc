"""Tokenization: texts to token ids, as a model's tokenizer.json says, cut to the model's length."""
