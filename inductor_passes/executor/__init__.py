"""The executor of regions: layers that are alike are compiled once.

``regions`` cuts an ordered graph, with ``rematerialize`` so that little is handed from region to
region, and with ``updates`` so that a region writes what the graph writes; ``regional`` has
Inductor compile each structure, and ``straight_line`` writes the Python that calls them, with
launches and waits, in the planned order.
"""
