"""What fits, and how fast: one trace with its sizes left open answers for every cell.

A *cell* is a batch, a sequence length and a number of ranks. ``traced`` traces a model with those
left open; ``plans`` makes the candidates for its collectives, once; ``cells`` tells what each takes
in each cell, and chooses; ``fit`` finds the largest batch or sequence; ``axes`` reads what is asked
for on the command line. Nothing here runs a model, and nothing is measured.
"""
