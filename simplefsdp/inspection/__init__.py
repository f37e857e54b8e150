"""Inspection: what the compiler did with a model's collectives, what is exposed, and why."""
