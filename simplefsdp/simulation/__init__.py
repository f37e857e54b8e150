"""Steps that are not run: their graphs, and what these take on any cluster.

``trace`` makes the graphs of a step without memory, ``extrapolate_depth`` those of a deep model
from a shallow one's, ``rank_sizes`` those for other numbers of ranks. ``prediction`` prices them.
"""
