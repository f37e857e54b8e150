"""A search for plans that are better than regular ones, by small changes, judged by simulation.

A regular plan is slow at its ends, and where layers differ: there compute stands still for a
bucket. A climb looks for the longest such stall, and changes what causes it: ::

    wire     [ g0 ][   g1   ][   g2   ]          stall: op c1 waits for bucket g1
    compute        [ c0 ]····[ c1 ]··[ c2 ]

    part g1      [ g0 ][ g1a][ g1b][  g2   ]     what c1 needs first is there earlier: c1 starts,
    compute            [ c0 ][ c1 ]...           and a launch more is paid
    shift        [ g0  ][  g1  ][   g2   ]       or the first members of g1 travel with g0
    turn         [g1 before g0's use]            or g1 is launched earlier, and takes memory longer

``moves`` are such changes: buckets are parted, joined, shifted at a border, doubled, halved, and
turned to start earlier or be waited for later; in one layer, or in all that are alike at once. A
change is kept if the step gets faster and memory still fits. If the plan where a climb begins does
not fit, the buckets that are alive at the peak are first *repaired*: parted, or started later. ::

    program ─ glue ─ compact ─▶ small program ─ regular plans ─▶ climb, move by move ─▶ its end
                                     ▲                             │
                                     └── schedules, simulate ◀─────┘  one try: 0.3 to 1.2 ms

There is one model of time and memory, ``machine.simulate``, on a program with fewer ops. ``glue``
sends small neighbours together, ``compact`` makes a stretch of compute one op, and ``schedules``
knows what the orders of all plans share; ``small`` is all three. What a climb ends at is priced
on the whole program (``climbs``); a plan that does not fit there goes on with less room.

Read ``tried`` first, what is known of a plan that was tried, then ``moves``, ``local_search``,
which makes one climb, and ``climbs``, which chooses where climbs begin. ``halves`` plans a whole
training step as a forward and a backward, to begin a climb there. The allowed work is counted in
simulated ops and not in seconds, so that all ranks find the same plan.

Why a search: without it (the best of the regular plans), plans of 96 random programs were 4 %
slower on average and up to 31 %; where memory is tight, 14 % and 38 % (``benchmarks/LOG.md``).
"""
