"""Predicts the time and memory of a training step on any cluster, without running the step.

``trace`` makes the graphs of a step without allocating memory. ``extrapolate_depth`` derives the
graphs of a deep model from those of a shallow one, and ``rank_sizes`` those for other numbers of
ranks. ``prediction`` says what the graphs cost.
"""
