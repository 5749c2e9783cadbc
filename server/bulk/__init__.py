"""Many texts from files, through every device, into files: what `embert embed --file` runs.

The command's own process reads blocks of rows, and says where in the output each goes. Text processes tokenize a block,
format its answers and write them, and an engine process for each device encodes it. A block lies in a slot of shared
memory all the while; processes tell each other where in it. The number of slots bounds the memory.
"""
