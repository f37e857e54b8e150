"""Which collectives share a bucket, and when each starts, by a cost model and a memory budget.

Read ``plan`` first, what is to be found and how it is priced, then ``auto``, which finds it: ::

    program ─ invariant ─▶ what all ranks share
                             │
                             ├─▶ the plan by module: good enough? ──────────────▶ taken
                             ├─▶ that in parts (regular): fits, as fast? ───────▶ taken
                             └─▶ search: climbs from regular plans ─▶ the best that fits

``segments`` defines the form in which plans are varied and searched. ``regular`` makes plans whose
buckets are all alike; ``search``, a package of its own, changes them where that helps.
``invariant`` hides what ranks do not share, so that all plan alike, and ``update`` hides the
optimizer of a whole step. ``greedy`` is the published rule, to compare with; ``keep`` chooses full
parameters to keep from forward to backward. Nothing here knows torch.
"""
