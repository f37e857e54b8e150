"""The executor of regions: layers that are alike are compiled once.

``regions`` cuts an ordered graph into regions. ``rematerialize`` keeps small what is handed from
region to region, and ``updates`` has regions write to the graph's inputs themselves. ``regional``
has Inductor compile each structure, and ``straight_line`` writes the Python that calls the
regions, with launches and waits, in the planned order.
"""
