"""A model's weights in the folder format of Hugging Face: safetensors files, and an index of them.

Weights go directly into shards and out of them, so that no rank ever holds the whole model. Read in
this order:

- ``named`` gives the model's tensors by the names of the plain model. ``together`` makes all ranks
  fail if one fails.
- ``files`` lists the tensors in a folder, ``match`` says which of them goes where, ``buffers``
  makes the buffers that no file has, and ``load`` combines these.
- ``send`` brings the shards of a tensor to one rank, ``writer`` writes files piece by piece, and
  ``save`` combines these.
- ``huggingface`` has all that is specific to transformers, and is used only for its models.

Nothing here knows of the reference models or of the trainer, which also use ``writer``. What is
wrong with a model or a folder is reported by a ValueError.
"""
