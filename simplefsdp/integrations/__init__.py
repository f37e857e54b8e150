"""Libraries that people train with, for models wrapped by simple_fsdp.

Nothing here is imported by the rest of simplefsdp, and no library is imported before its module is:

- ``accelerate``: an ``Accelerator`` that takes a wrapped model as it is;
- ``transformers``: a ``Trainer`` with that accelerator, which saves shards and resumes from them;
- ``peft``: adapters, saved without the frozen base;
- ``lightning``: the strategy ``"simplefsdp"`` of its Trainer and of Fabric;
- ``torchtitan``: its configurations, with ``simple_fsdp`` in place of FSDP2;
- ``pipelining``: a stage of torch's pipelines, whose micro-batches share one reduce;
- ``checkpoint``: what these save, by torch's distributed checkpoints. It knows none of them.
"""
