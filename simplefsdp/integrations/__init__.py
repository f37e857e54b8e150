"""Training with other libraries, for models wrapped by simple_fsdp.

The rest of simplefsdp imports nothing from here. Only its own module imports a library:

- ``accelerate``: an ``Accelerator`` that takes a wrapped model as it is;
- ``transformers``: a ``Trainer`` with that accelerator, which saves shards and resumes from them;
- ``peft``: adapters, saved without the frozen base;
- ``lightning``: the strategy ``"simplefsdp"`` of its Trainer and of Fabric;
- ``torchtitan``: its configurations, with ``simple_fsdp`` in place of FSDP2;
- ``pipelining``: a stage of torch's pipelines, whose micro-batches share one reduce;
- ``checkpoint``: saves and loads for these modules, as torch's distributed checkpoints. It knows
  none of the libraries.
"""
