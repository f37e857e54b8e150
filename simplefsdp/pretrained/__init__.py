"""A model's weights in the folder format of Hugging Face: safetensors files, and an index of them.

Into shards and out of them, so that no rank ever holds the model. Read in this order:

- ``named`` is the model's tensors by the plain model's names, and the ranks that hold them;
  ``together`` has all ranks fail where one fails.
- ``files`` reads what is in a folder, ``match`` says which of it goes where, ``buffers`` makes
  what no file has, and ``load`` puts them together.
- ``send`` brings a shard's parts to one rank, ``writer`` writes files piece by piece, and ``save``
  puts them together.
- ``huggingface`` is all that is said of transformers; it is asked only about models of theirs.

Nothing here knows of the reference models or of the trainer, which write by ``writer``, too. What
is wrong with a model or a folder is told by a ValueError.
"""
