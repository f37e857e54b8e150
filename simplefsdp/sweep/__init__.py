"""Predicts what fits, and how fast it is: one trace with open sizes answers for every cell.

A *cell* is a batch, a sequence length and a number of ranks. ``traces`` traces a model with these
sizes left open, and ``traced`` reads such a trace. ``plans`` makes candidate plans for the
collectives, once. ``cells`` computes the time and memory of each candidate in each cell, and
chooses the best. ``fit`` finds the largest batch or sequence; ``axes`` reads the sizes on the
command line. Nothing here runs a model, and nothing is measured.
"""
