"""The CPU encoder, on numpy's arrays: our own kernels compute. Never imports torch."""
