"""The files of a distributed checkpoint, which may come from anybody, and may be damaged.

1. ``pickled`` reads data out of a pickle and runs nothing of it; ``metadata`` makes of it what
   torch's reader needs, and sees that all of it fits together and stays in its folder.
2. ``checksums`` are of each file, written beside them; ``saving`` makes them as the files are
   written.
3. ``opened`` is a checkpoint of which the metadata has been read, once: its files are compared with
   their checksums, in one process or on all ranks, and read.

Nothing here knows what a checkpoint is of: a model, an optimizer, a trainer. What is wrong with a
file is told by a ValueError of one line.
"""
