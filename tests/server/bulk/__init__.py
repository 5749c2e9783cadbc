"""`embert embed --file`: inputs, outputs, processes, and what a kill leaves behind."""
