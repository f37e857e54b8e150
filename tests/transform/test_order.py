"""Overlap: what starts when, within which limits, and that it depends on nothing it must not."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from programs import ROUND_COST, ancestors, descendants, layers, random_program, renamed

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Bucket, Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import simulate
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, in_sequence, overlap, starts_in

LIMITS = (1, 2, 3)


def overlapped(program: Program, *limits: int) -> list[str]:
    """The new order, checked to be legal."""
    order = overlap(program, OverlapPolicy(*limits))
    program.reorder(order).verify()
    return order


def text_of(order: list[str]) -> str:
    return " ".join(order)


def test_forward():
    order = overlapped(parse(layers(4, "forward")))
    assert text_of(order) == "g0 g1 w0 v0 mm0 g2 w1 v1 mm1 g3 w2 v2 mm2 w3 v3 mm3"


def test_forward_without_looking_ahead():
    order = overlapped(parse(layers(3, "forward")), 1)
    assert text_of(order) == "g0 w0 v0 mm0 g1 w1 v1 mm1 g2 w2 v2 mm2"


def test_backward():
    assert text_of(overlapped(parse(layers(4, "backward")))) == (
        "g3 g2 w3 v3 dgrad3 wgrad3 r3 "
        "g1 w2 v2 dgrad2 wgrad2 r2 "
        "g0 w1 v1 dgrad1 wgrad1 rw3 divide3 r1 "
        "w0 v0 dgrad0 wgrad0 rw2 divide2 r0 "
        "rw1 divide1 rw0 divide0"
    )


def test_backward_with_one_gather_and_one_reduce():
    assert text_of(overlapped(parse(layers(3, "backward")), 1, 1)) == (
        "g2 w2 v2 dgrad2 wgrad2 r2 "
        "g1 w1 v1 dgrad1 wgrad1 rw2 divide2 r1 "
        "g0 w0 v0 dgrad0 wgrad0 rw1 divide1 r0 "
        "rw0 divide0"
    )


def test_a_cast_goes_with_its_gather_and_a_view_with_its_user():
    text = """\
input x: 8
resident p: 8
resident q: 8
view pv(p) -> p2: 8 @p
compute pc(p2) -> p3: 4
start g(p3) -> full_p: 8 | gather group=dp ranks=4 nbytes=8 dtype=f32
wait w(full_p) -> a: 8 @full_p
view av(a) -> a2: 8 @full_p
compute f(x, a2) -> y: 8
view qv(q) -> q2: 8 @q
compute qc(q2) -> q3: 4
start h(q3) -> full_q: 8 | gather group=dp ranks=4 nbytes=8 dtype=f32
wait u(full_q) -> b: 8 @full_q
view bv(b) -> b2: 8 @full_q
compute mm(y, b2) -> z: 8
output z
"""
    assert text_of(overlapped(parse(text))) == "pv pc g qv qc h w av f u bv mm"


def test_collectives_of_others_stay():
    text = layers(3, "forward").replace("| gather", "| other")
    program = parse(text)
    order = overlapped(program)
    assert starts_in(program, order) == ["g0", "g1", "g2"]
    assert order == [op.name for op in program.ops]


def windowed(part: str, n: int, **windows: int) -> Program:
    """Layers whose buckets, by the names of their starts, have windows of their own."""
    program = parse(layers(n, part))
    buckets = [Bucket(name, (name,), window) for name, window in windows.items()]
    return merge(program, buckets)


def test_each_gather_has_its_window():
    """g1 goes at once with g0, g2 when it is needed, g3 two buckets ahead: before w1 and g2."""
    program = windowed("forward", 4, g0=1, g1=2, g2=1, g3=1)
    assert text_of(overlapped(program)) == "g0 g1 w0 v0 mm0 w1 v1 mm1 g2 w2 v2 mm2 g3 w3 v3 mm3"
    program = windowed("forward", 4, g0=1, g1=9, g2=1, g3=3)
    assert text_of(overlapped(program)) == "g0 g1 w0 v0 mm0 g2 g3 w1 v1 mm1 w2 v2 mm2 w3 v3 mm3"


def test_each_reduce_has_its_window():
    """r3 is waited for at the end, r2 before the next starts."""
    program = windowed("backward", 4, r3=4, r2=1, r1=1, r0=1, g3=1, g2=1, g1=1, g0=1)
    assert text_of(overlapped(program)) == (
        "g3 w3 v3 dgrad3 wgrad3 r3 "
        "g2 w2 v2 dgrad2 wgrad2 r2 "
        "g1 w1 v1 dgrad1 wgrad1 rw2 divide2 r1 "
        "g0 w0 v0 dgrad0 wgrad0 rw1 divide1 r0 "
        "rw3 divide3 rw0 divide0"
    )


def test_a_reduce_is_waited_for_where_a_gather_is_used():
    """r3 before g2's use, before g1 goes out there; r2 before g0's, the second use behind it; and
    r0 has no use behind it."""
    windows = {"r3": -1, "r2": -2, "r1": 1, "r0": -1, "g3": 1, "g2": 1, "g1": 2, "g0": 1}
    assert text_of(overlapped(windowed("backward", 4, **windows))) == (
        "g3 w3 v3 dgrad3 wgrad3 r3 "
        "rw3 divide3 g2 g1 w2 v2 dgrad2 wgrad2 r2 "
        "w1 v1 dgrad1 wgrad1 r1 "
        "rw2 divide2 g0 w0 v0 dgrad0 wgrad0 rw1 divide1 r0 "
        "rw0 divide0"
    )


def test_windows_of_random_buckets_are_legal_and_keep_the_gathers_in_order():
    for seed in range(200):
        rng, n = random.Random(seed), 6
        names = [f"{kind}{k}" for k in range(n) for kind in "gr"]
        program = windowed(
            "backward", n, **{name: rng.randint(-3 * (name[0] == "r"), 4) for name in names}
        )
        order = overlapped(program, rng.choice(LIMITS), rng.choice(LIMITS))
        gathers = [name for name in starts_in(program, order) if name[0] == "g"]
        assert gathers == [f"g{k}" for k in reversed(range(n))], seed


def most_pending(program: Program, order: list[str], kind: str) -> int:
    """Largest number of buckets that are started but not all waited for."""
    program = program.reorder(order)
    bucket_of, left, most = {}, Counter(), 0
    for i, op in program.starts():
        if op.collective.kind == kind:
            bucket_of[i] = (op.collective.group, op.collective.bucket or op.name)
    for i in range(len(program.ops)):
        if i in bucket_of:
            left[bucket_of[i]] += len(program.waits_of[i])
        for start in program.start_of.get(i, ()):
            if start in bucket_of:
                left[bucket_of[start]] -= 1
        most = max(most, sum(n > 0 for n in left.values()))
    return most


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_gathers_go_ahead_within_the_limit(part, limit):
    program = parse(layers(4, part))
    order = overlapped(program, limit)
    assert most_pending(program, order, "gather") == limit
    place = order.index
    ks = range(4) if part == "forward" else range(3, -1, -1)
    for k, following in itertools.pairwise(ks):
        assert (place(f"g{following}") < place(f"w{k}")) == (limit > 1)
        assert place(f"w{k}") < place(f"w{following}")


@pytest.mark.parametrize("limit", LIMITS)
def test_reduces_are_pending_within_the_limit(limit):
    program = parse(layers(5, "backward"))
    order = overlapped(program, 2, limit)
    assert most_pending(program, order, "reduce") == limit
    for k in range(5):
        assert order.index(f"r{k}") == order.index(f"wgrad{k}") + 1 + 2 * (k + limit < 5)
        assert order.index(f"divide{k}") == order.index(f"rw{k}") + 1


@pytest.mark.parametrize("limit", LIMITS[1:])
def test_the_next_gather_goes_out_before_the_reduce(limit):
    order = overlapped(parse(layers(4, "backward")), limit)
    for k in range(1, 4):
        assert order.index(f"g{k - 1}") < order.index(f"r{k}")


@pytest.mark.parametrize("limit", LIMITS)
def test_the_limit_holds_for_buckets_that_one_op_uses(limit):
    lines = ["input x: 8", *(f"resident p{k}: 8" for k in range(6))]
    for k in range(6):
        lines.append(
            f"start g{k}(p{k}) -> y{k}: 8 | gather group=dp ranks=4 nbytes=8 dtype=f32\n"
            f"wait w{k}(y{k}) -> z{k}: 8 @y{k}"
        )
    lines += ["compute f(x, z0, z1, z2) -> a: 8", "compute mm(a, z3, z4, z5) -> b: 8"]
    program = parse("\n".join(lines))
    assert most_pending(program, overlapped(program, limit), "gather") == limit


@pytest.mark.parametrize("limit", LIMITS)
def test_the_limit_holds_for_gradients_that_one_op_makes(limit):
    lines = ["input x: 8", "compute f(x) -> a: 8, b: 8, c: 8, d: 8"]
    for name in "abcd":
        lines.append(
            f"start r{name}({name}) -> y{name}: 2 | "
            "reduce group=dp ranks=4 nbytes=8 dtype=f32 op=sum\n"
            f"wait w{name}(y{name}) -> z{name}: 2 @y{name}"
        )
    program = parse("\n".join(lines))
    assert most_pending(program, overlapped(program, 2, limit), "reduce") == limit


def random_backward(seed: int) -> Program:
    """Gathers that several ops use, and ops that use several and make several gradients."""
    rng, lines, ops = random.Random(seed), ["input x: 8"], []
    for k in range(6):
        lines.append(f"resident p{k}: 8")
        ops.append(
            f"start g{k}(p{k}) -> y{k}: 8 | gather group=dp ranks=4 nbytes=8 dtype=f32\n"
            f"wait w{k}(y{k}) -> z{k}: 8 @y{k}"
        )
    for k in range(6):
        read = ", ".join(f"z{j}" for j in rng.sample(range(6), rng.randint(0, 3)))
        made = [f"d{k}_{j}" for j in range(rng.randint(1, 3))]
        ops.append(f"compute f{k}({read}) -> " + ", ".join(f"{name}: 8" for name in made))
        ops += [
            f"start r{name}({name}) -> p{name}: 2 | "
            "reduce group=dp ranks=4 nbytes=8 dtype=f32 op=sum\n"
            f"wait rw{name}(p{name}) -> s{name}: 2 @p{name}\n"
            f"compute div{name}(s{name}) -> q{name}: 2"
            for name in made
        ]
    return parse("\n".join(lines + ops))


def test_the_limits_hold_on_random_backwards():
    for seed in range(150):
        program, policy = random_backward(seed), random_policy(seed)
        order = overlapped(program, policy.max_inflight_gathers, policy.max_pending_reduces)
        assert most_pending(program, order, "gather") <= policy.max_inflight_gathers, seed
        assert most_pending(program, order, "reduce") <= policy.max_pending_reduces, seed


@pytest.mark.parametrize("limit", LIMITS)
def test_collectives_of_one_bucket_count_as_one(limit):
    text = layers(6, "forward")
    for k in range(6):
        text = text.replace(f"fqns=layers.{k}.", f"bucket=pair{k // 2} fqns=layers.{k}.")
    program = parse(text)
    order = overlapped(program, limit)
    assert most_pending(program, order, "gather") == min(limit, 3)
    for k in (0, 2, 4):
        assert order.index(f"g{k + 1}") == order.index(f"g{k}") + 1


def test_a_label_is_not_the_name_of_a_start():
    """An unlabelled start is a bucket by itself, whatever others call their buckets."""
    text = layers(4, "forward").replace("fqns=layers.3.", "bucket=g1 fqns=layers.3.")
    other = text.replace("bucket=g1", "bucket=another")
    assert overlapped(parse(text)) == overlapped(parse(other))


def shuffled_names(program: Program, seed: int) -> dict[str, str]:
    names = [op.name for op in program.ops] + list(program.buffers)
    names = list(dict.fromkeys([*names, "dp", "tp", "rep"]))
    others = [f"n{k}" for k in range(len(names))]
    random.Random(seed).shuffle(others)
    return dict(zip(names, others, strict=True))


def merged_randomly(program: Program, seed: int) -> Program:
    """Merged as far as the planner and the dependencies allow, so that buckets are labelled."""
    rng = random.Random(seed)
    fqns = [fqn for _, op in program.starts() for fqn in op.collective.fqns]
    assignment = replace(assign_by_module(fqns), label_of={f: rng.choice("xyz") for f in fqns})
    for bucket in plan_buckets(program, assignment):
        try:
            program = merge(program, [bucket])
        except ValueError:
            continue
    return program


def make(seed: int) -> Program:
    """A random program; every second of them merged."""
    program = random_program(seed, 20)
    return merged_randomly(program, seed) if seed % 2 else program


@cache
def programs() -> list[tuple[int, Program]]:
    return [(seed, make(seed)) for seed in range(500)]


def random_policy(seed: int) -> OverlapPolicy:
    rng = random.Random(seed)
    return OverlapPolicy(rng.choice(LIMITS), rng.choice(LIMITS))


def test_random_orders_are_legal_and_deterministic():
    for seed, program in programs():
        policy = random_policy(seed)
        order = overlap(program, policy)
        assert program.reorder(order).verify(), seed
        assert overlap(make(seed), policy) == order, seed


def test_random_compute_keeps_its_order():
    """All but what feeds collectives that move ahead, and what follows reduces that are late."""
    for seed, program in programs():
        kinds = {i: op.collective.kind for i, op in program.starts()}
        late = {w for i, k in kinds.items() if "reduce" in k for w in program.waits_of[i]}
        ahead = {i for i, k in kinds.items() if k == "gather"}
        ahead |= {w for i in ahead for w in program.waits_of[i]}
        # The memory limit may call a reduce early, and with it what the same wait waits for.
        ahead |= {w for w, starts in program.start_of.items() if len(starts) > 1}
        moved = ancestors(program, ahead) | descendants(program, late)
        still = {op.name for i, op in enumerate(program.ops) if i not in moved}
        still = {name for name in still if program.ops[program.index[name]].kind == "compute"}
        order = overlap(program, random_policy(seed))
        kept = [name for name in order if name in still]
        assert kept == [op.name for op in program.ops if op.name in still], seed


def test_random_starts_are_kept_if_asked():
    for seed, program in programs():
        order = overlap(program, random_policy(seed), keep_starts=True)
        assert program.reorder(order).verify(), seed
        assert starts_in(program, order) == [op.name for _, op in program.starts()], seed


def but_divides(order: list[str]) -> list[str]:
    return [name for name in order if not name.startswith("divide")]


@pytest.mark.parametrize("limits", [(1, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_what_is_planned_stays_so(part, limits):
    """Starts, waits and compute that overlap has ordered keep_starts leaves where they are."""
    program = parse(layers(5, part))
    planned = overlapped(program, *limits)
    kept = overlap(program.reorder(planned), OverlapPolicy(*limits), keep_starts=True)
    assert but_divides(kept) == but_divides(planned)


@pytest.mark.parametrize("limits", [(1, 1), (2, 2), (3, 2), (2, 3)])
def test_a_plan_is_restored_if_every_wait_came_early(limits):
    """As by a scheduler that puts every wait right behind its start."""
    program = parse(layers(4, "backward"))
    planned = overlapped(program, *limits)
    wait_of = {f"g{k}": f"w{k}" for k in range(4)} | {f"r{k}": f"rw{k}" for k in range(4)}
    early = [[name, wait_of.get(name, "")] for name in planned if name not in wait_of.values()]
    undone = program.reorder([name for pair in early for name in pair if name])
    kept = overlap(undone, OverlapPolicy(*limits), keep_starts=True)
    assert but_divides(kept) == but_divides(planned)


@pytest.mark.parametrize("keep_starts", [False, True])
def test_names_do_not_matter(keep_starts):
    for seed, program in programs():
        policy = random_policy(seed)
        new = shuffled_names(program, seed)
        order = overlap(program, policy, keep_starts=keep_starts)
        other = overlap(renamed(program, new.__getitem__), policy, keep_starts=keep_starts)
        assert other == [new[name] for name in order], seed


@pytest.mark.parametrize("keep_starts", [False, True])
def test_sizes_of_buffers_do_not_matter(keep_starts):
    """Shards differ in size from rank to rank, and all ranks must order alike."""
    for seed, program in programs():
        rng, policy = random.Random(seed), random_policy(seed)
        sizes = {n: replace(b, nbytes=rng.randint(0, 99)) for n, b in program.buffers.items()}
        order = overlap(program, policy, keep_starts=keep_starts)
        other = replace(program, buffers=sizes).verify()
        assert overlap(other, policy, keep_starts=keep_starts) == order, seed


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_overlap_never_takes_longer_on_layers(part):
    for n in (1, 2, 3, 8):
        program = parse(layers(n, part))
        for latency_us in (0, 1, 30, 300):
            cost = LinearCost(latency_us, link_gb_s=0.01, launch_us=10)
            before = simulate(program, cost)
            for gathers in LIMITS:
                for reduces in LIMITS:
                    order = overlapped(program, gathers, reduces)
                    after = simulate(program.reorder(order), cost)
                    assert after.total_us <= before.total_us + 1e-6, (n, latency_us)
                    assert after.compute_us == pytest.approx(before.compute_us)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_overlap_hides_what_can_be_hidden(part):
    """Compute takes 10 us an op, collectives 8: only the first gather cannot be hidden."""
    program = parse(layers(8, part))
    cost = replace(ROUND_COST, latency_us=8, link_gb_s=float("inf"))
    order = overlapped(program)
    after = simulate(program.reorder(order), cost)
    assert after.total_us == after.compute_us + 8
    assert {name: us for name, us in after.exposed_us.items() if us} == {order[0]: 8}


def legal_orders(program: Program, at_most: int) -> list[list[int]]:
    """All of them; none if there are more than ``at_most``."""
    orders: list[list[int]] = []

    def extend(order: list[int], left: list[int]) -> None:
        if not left:
            orders.append(order)
        for i in left:
            if len(orders) <= at_most and not set(left).intersection(program.predecessors[i]):
                extend([*order, i], [j for j in left if j != i])

    extend([], list(range(len(program.ops))))
    return orders if len(orders) <= at_most else []


def test_small_programs_against_brute_force():
    """Overlap knows no costs, so it may miss the optimum: by less than half of what it takes."""
    factors = []
    for seed in range(300):
        program = random_program(seed, 6)
        orders = legal_orders(program, 400) if len(program.ops) <= 8 else []
        if len(orders) < 3 or not any(program.starts()):
            continue
        permuted = (replace(program, ops=tuple(program.ops[i] for i in o)) for o in orders)
        best = min(simulate(p, ROUND_COST).total_us for p in permuted)
        order = overlap(program, OverlapPolicy())
        total = simulate(program.reorder(order), ROUND_COST).total_us
        assert best <= total < 2 * best, seed
        factors.append(total / best)
    assert len(factors) > 100
    assert statistics.mean(factors) < 1.06


def bytecodes(call: Callable[[], object]) -> int:
    """Bytecode instructions that ``call`` executes: a clock that does not depend on the machine."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_work_grows_like_the_program(part):
    def work(n: int) -> int:
        program = parse(layers(n, part))
        fqns = [f"layers.{k}.weight" for k in range(n)]
        pairs = [[f"layers.{k}", f"layers.{k + 1}"] for k in range(0, n, 2)]
        assignment = assign_by_module(fqns, pairs)

        def passes() -> None:
            merged = merge(program, plan_buckets(program, assignment))
            merged.reorder(overlap(merged, OverlapPolicy()))

        return bytecodes(passes)

    assert work(120) < 4.4 * work(30)


def test_ops_come_back_to_their_places():
    """Whatever moved them, as far as the sequence of the launches allows."""
    program = parse(layers(3, "backward"))
    place = {op.name: i for i, op in enumerate(program.ops)}
    moved = program.reorder(overlap(program, OverlapPolicy(3, 3)))
    starts = starts_in(moved, [op.name for op in moved.ops])
    assert starts != starts_in(program, place)
    back = in_sequence(moved, [place[op.name] for op in moved.ops])
    assert starts_in(moved, back) == starts
    assert [n for n in back if "grad" in n] == [n for n in place if "grad" in n]


def test_what_was_fused_comes_where_its_last_part_was():
    text = layers(3, "forward").replace("start g1", "compute f(h1) -> y: 64\nstart g1")
    program = parse(text + "\noutput y")
    late = [len(program.ops) if op.name == "f" else i for i, op in enumerate(program.ops)]
    assert text_of(in_sequence(program, range(len(late)))).startswith("g0 w0 v0 mm0 f")
    assert text_of(in_sequence(program, late)).endswith("mm2 f")


def test_random_sequences_are_legal():
    for seed in range(200):
        program = random_program(seed, 40)
        place = [random.Random(seed + i).randrange(9) for i in range(len(program.ops))]
        order = in_sequence(program, place)
        program.reorder(order).verify()
        names = [op.name for op in program.ops]
        assert starts_in(program, order) == starts_in(program, names)
        assert in_sequence(program, range(len(names))) == names
