"""A CPU's matrix products: linear layers of each kind of kernel, what adapters add, and which kind is chosen."""
