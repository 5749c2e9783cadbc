"""What an encoder computes: the description, the names of its tensors and their shapes."""
