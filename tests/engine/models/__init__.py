"""Models that differ from BERT by more than names: what their configs say, and the arithmetic that no other has."""
