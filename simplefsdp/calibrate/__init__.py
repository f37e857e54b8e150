"""``simplefsdp calibrate``: measure the machine at hand as a :class:`Cluster`."""
