"""int8: the definition, the CPU encoder compared with it, and the accuracy that is reported."""
