"""What people would run instead of embert: kernels, encoders and servers."""
