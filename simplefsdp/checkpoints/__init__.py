"""The files of a distributed checkpoint, which may come from anybody, and may be damaged.

1. ``pickled`` reads plain data out of a pickle without running anything in it. ``metadata`` turns
   that data into what torch's reader needs, and checks that its parts fit together and that it
   names no file outside of its folder.
2. ``checksums`` reads and writes the checksums of the files; ``saving`` computes them while a
   checkpoint is written.
3. ``opened`` is a checkpoint whose metadata has been read once. It compares the files with their
   checksums, in one process or on all ranks, and reads them.

Nothing here knows what a checkpoint contains: a model, an optimizer, a trainer. What is wrong with
a file is reported by a ValueError of one line.
"""
