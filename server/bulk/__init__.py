"""`embert embed --file`: texts from files, through every device, into files.

The command's process reads blocks of rows and writes the results. Tokenization processes tokenize and format blocks,
and one engine process for each device encodes them. The data of a block stays in one shared buffer; messages
between the processes say where in it. The number of buffers bounds the memory.
"""
