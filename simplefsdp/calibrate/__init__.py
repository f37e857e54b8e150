"""``simplefsdp calibrate``: measures the machine at hand and describes it as a :class:`Cluster`."""
