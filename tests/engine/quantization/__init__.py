"""Eight bits: the definition, the CPU encoder beside it, and what is said of their cost."""
