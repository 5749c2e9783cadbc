"""Ray Data and Ray Serve, on a real cluster of several nodes, which are processes of this machine."""
