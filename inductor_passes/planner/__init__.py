"""Which collectives share a bucket, and when each starts, by a cost model and a memory budget.

Read ``plan`` first, what is to be found, then ``auto``, which finds it: ::

    program ─ glue, compact ─▶ a program of few ops ─ regular ─▶ starts
                                                                  │ local_search, by moves
                                                   segments, tried ▼
                                                            the best that fits

``segments`` are what a search decides about, ``tried`` is what it knows of a plan. ``glue`` keeps
small neighbours together, ``compact`` makes runs of compute one op, and ``schedules`` knows what
all plans of a program share, so that trying is cheap (all three together are ``small``): a plan is
tried with ``machine.simulate``, no other model. ``invariant`` hides what ranks do not share, so
that all plan alike. ``greedy`` is the published rule, to compare with; ``keep`` chooses full
parameters to keep from forward to backward; ``units`` are what the regional executor calls.
"""
