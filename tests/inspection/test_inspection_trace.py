"""Measured traces: exposed time worked out by hand, and files that are broken."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from test_inspection_perfetto import plan

from simplefsdp.cli import main
from simplefsdp.inspection.intervals import difference, intersection, length, union
from simplefsdp.inspection.matching import match
from simplefsdp.inspection.measured import measure, measured_document
from simplefsdp.inspection.perfetto import trace_events
from simplefsdp.inspection.profile import read_profiles

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclKernel_ReduceScatter_RING_LL_Sum_bf16(ncclDevComm*, unsigned long, ncclWork*)"
OLD = "ncclAllGatherRingLLKernel_copy_i8(ncclColl)"


def event(name, begin, us, cat="kernel", tid=7, **args):
    return {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": begin, "dur": us,
            "args": args}  # fmt: skip


def kernel(name, begin, us, stream=7, correlation=0, **args):
    return event(name, begin, us, stream=stream, device=0, correlation=correlation, **args)


def written(tmp_path, events, **more):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return path


def measured(tmp_path, events, **more):
    (profile,) = read_profiles(written(tmp_path, events, **more))
    return measure(profile)


def test_overlap_by_hand(tmp_path):
    # compute on two streams:   [0,10)  [12,30)      [50,60)
    # gathers and a reduce:     [5,20)       [25,45)     [55,65)
    report = measured(
        tmp_path,
        [
            kernel("gemm", 0, 10),
            kernel("gemm", 12, 13),
            kernel("copy", 20, 10, stream=9),
            kernel("gemm", 50, 10),
            kernel(GATHER, 5, 15, stream=20, **{
                "In msg nelems": 1000, "Out msg nelems": 8000, "dtype": "BFloat16"}),
            kernel(REDUCE, 25, 20, stream=20, **{
                "In msg nelems": 16000, "Out msg nelems": 2000, "dtype": "Float"}),
            kernel(OLD, 55, 10, stream=20),
            event("ncclDevKernel_AllGather: not on the device", 0, 99, cat="cpu_op"),
            event("aten::mm", 0, 99, cat="cpu_op"),
        ],
        distributedInfo={"rank": 3},
    )  # fmt: skip
    assert report.name == "rank 3"
    assert (report.total_us, report.compute_us, report.communication_us) == (65, 38, 45)
    assert [m.transfer.kind for m in report.transfers] == ["gather", "reduce", "gather"]
    assert [m.exposed_us for m in report.transfers] == [2, 15, 5]
    assert (report.exposed_us, report.idle_us) == (22, 5)
    assert report.overlap == pytest.approx(23 / 45)
    assert [m.transfer.nbytes for m in report.transfers] == [16000, 64000, None]
    assert report.transfers[0].gb_s == pytest.approx(16000 / 15e3)
    assert report.gaps == ()


def test_transfers_that_overlap_each_other_count_once_in_the_sum(tmp_path):
    report = measured(
        tmp_path, [kernel("gemm", 0, 5), kernel(GATHER, 5, 10, 20), kernel(REDUCE, 10, 10, 21)]
    )
    assert [m.exposed_us for m in report.transfers] == [10, 10]
    assert (report.communication_us, report.exposed_us, report.overlap) == (15, 15, 0)


def test_grouped_kernels_are_told_by_their_collective(tmp_path):
    name = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    report = measured(
        tmp_path,
        [
            kernel(name, 0, 5, **{"Collective name": "reduce_scatter_tensor_coalesced"}),
            kernel(name, 5, 5, **{"Collective name": "allgather_into_tensor_coalesced"}),
            kernel("ncclDevKernel_SendRecv(x)", 10, 5),
            kernel("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(x)", 15, 5),
        ],
    )
    kinds = [m.transfer.kind for m in report.transfers]
    assert kinds == ["reduce", "gather", "other", "all_reduce"]


def test_gaps_and_whose_fault_they_are(tmp_path):
    report = measured(
        tmp_path,
        [
            kernel("a", 0, 10, correlation=1),
            kernel("b", 30, 10, correlation=2),  # launched while a ran
            kernel("c", 90, 10, correlation=3),  # launched when the device stood still
            kernel("d", 105, 10, correlation=4),  # 5 us are no gap
            kernel(GATHER, 130, 10, 20, correlation=5),
            *(
                event("cudaLaunchKernel", at, 1, cat="cuda_runtime", correlation=n)
                for n, at in ((1, -5), (2, 5), (3, 60), (4, 95), (5, 96))
            ),
        ],
    )
    assert [(gap.begin_us, gap.us, gap.before, gap.launch_bound) for gap in report.gaps] == [
        (40, 50, "c", True),
        (10, 20, "b", False),
        (115, 15, "", None),
    ]
    assert report.idle_us == 90


def test_a_modelled_wire_on_a_device(tmp_path):
    """A transfer is what its event launched: copies on one stream, what holds blocks on another;
    launches of another thread at that time, and of before and after, are compute."""

    def wire(kind, nbytes, begin):
        name = f"wire:{kind} nbytes={nbytes} begins_after_us=0.000 takes_us=20.000"
        return event(name, begin, 10, cat="user_annotation", tid=1)

    def launch(correlation, at, tid=1, cat="cuda_runtime"):
        return event("cudaLaunchKernel", at, 1, cat=cat, tid=tid, correlation=correlation)

    told = wire("gather", 4096, 10)
    report = measured(
        tmp_path,
        [
            told,
            {**told, "cat": "gpu_user_annotation", "tid": 20, "ts": 40},  # on the device, again
            wire("reduce", 8192, 50),
            launch(1, 5), launch(2, 11), launch(3, 15, cat="cuda_driver"), launch(4, 30),
            launch(5, 55), launch(6, 56, tid=2),
            kernel("gemm", 6, 30, correlation=1),
            event("Memcpy DtoD", 40, 10, cat="gpu_memcpy", device=0, stream=21, correlation=2),
            kernel("hold", 40, 20, 20, correlation=3),
            kernel("gemm", 36, 14, correlation=4),
            kernel("hold", 70, 20, 20, correlation=5),
            kernel("gemm", 70, 5, correlation=6),
        ],
    )  # fmt: skip
    assert [
        (m.transfer.kind, m.transfer.nbytes, m.transfer.begin_us, m.transfer.end_us)
        for m in report.transfers
    ] == [("gather", 4096, 40, 60), ("reduce", 8192, 70, 90)]
    assert [m.exposed_us for m in report.transfers] == [10, 15]
    assert report.exposed_us == 25


def test_gloo(tmp_path):
    """The main thread launches, computes and waits; gloo reduces to shards by all-reduce."""

    def main_thread(name, begin, us, **args):
        return event(name, begin, us, cat="cpu_op", tid=1, **args)

    def gloo(name, begin, us, thread, types):
        return event(name, begin, us, "user_annotation", thread, **{"Input type": types})

    wait = "_c10d_functional::wait_tensor"
    gather, reduce = "c10d::allgather_into_tensor_coalesced_", "c10d::_reduce_scatter_base_"
    coalesced = "c10d::reduce_scatter_tensor_coalesced_"
    report = measured(
        tmp_path,
        [
            event("ProfilerStep#1", 0, 100, "user_annotation", 1),
            main_thread("CompiledFunction", 0, 100),
            main_thread(gather, 0, 5, **{"Input Dims": [[[8, 4], [8]], [[4, 4], [4]], []]}),
            gloo("gloo:all_gather", 5, 45, 2, ["float", "float"]),
            main_thread(wait, 40, 10),
            main_thread(reduce, 60, 5, **{"Input Dims": [[4, 4], [8, 4], []]}),
            gloo("gloo:all_reduce", 65, 35, 3, ["c10::BFloat16"]),
            main_thread(wait, 80, 20),
            main_thread(coalesced, 100, 5, **{"Input Dims": [[[2], [1]], [[4], [2]], []]}),
            gloo("gloo:all_reduce", 105, 5, 3, ["float"]),
            gloo("gloo:all_reduce", 110, 5, 2, ["float"]),
        ],
    )
    assert [m.transfer.kind for m in report.transfers] == ["gather", "reduce", "reduce", "reduce"]
    assert [m.transfer.nbytes for m in report.transfers] == [40 * 4, 32 * 2, 4 * 4, 2 * 4]
    assert [m.exposed_us for m in report.transfers] == [10, 20, 5, 5]
    assert report.compute_us == 100 - 10 - 30  # launches and waits are none


def test_a_modelled_wire(tmp_path):
    """Two gathers of 30 us, one behind the other; launches copy for 10 and 5 us."""

    def main_thread(name, begin, us, cat="user_annotation"):
        return event(name, begin, us, cat, tid=1)

    gather = "wire:gather nbytes=3000 begins_after_us={} takes_us=30.000"
    report = measured(
        tmp_path,
        [
            main_thread("CompiledFunction", 0, 100, "cpu_op"),
            main_thread(gather.format("0.000"), 0, 10),
            main_thread(gather.format("20.000"), 10, 5),
            main_thread("_c10d_functional::wait_tensor", 18, 14, "cpu_op"),
            main_thread("wire:wait", 20, 10),
            main_thread("wire:wait", 50, 10),
            main_thread("wire:reduce nbytes=500 begins_after_us=0.5 takes_us=9.5", 80, 1),
            main_thread("wire:wait", 85, 5),
        ],
    )
    assert [m.transfer.kind for m in report.transfers] == ["gather", "gather", "reduce"]
    spans = [(m.transfer.begin_us, m.transfer.end_us) for m in report.transfers]
    assert spans == [(0, 30), (30, 60), (80.5, 90)]
    assert [m.transfer.nbytes for m in report.transfers] == [3000, 3000, 500]
    # Copies of 15 us and waits of 12; the rest of a wait, and 10; the rest of a copy, and a wait.
    assert [m.exposed_us for m in report.transfers] == [15 + 12, 2 + 10, 0.5 + 5]
    assert report.compute_us == 100 - 15 - 14 - 10 - 1 - 5


def test_what_was_predicted_is_measured_in_its_own_trace(tmp_path):
    plans = [plan("manual"), plan("none")]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace_events(plans)).encode()))
    profiles = read_profiles(path)
    assert [profile.name for profile in profiles] == ["plan manual", "plan none"]
    for predicted, profile in zip(plans, profiles, strict=True):
        report = measure(profile)
        assert report.exposed_us == pytest.approx(predicted.step.exposed_us)
        assert report.total_us == pytest.approx(predicted.step.step_us)
        assert {m.transfer.nbytes for m in report.transfers} == {64}


def test_predicted_and_measured_are_matched_bucket_by_bucket(tmp_path):
    predicted = plan("manual")
    events = trace_events([predicted])["traceEvents"]
    # A second step, and somebody else's all-reduce between the two.
    last = predicted.step.step_us + 1
    other = event("all_reduce norm", last, 9, "all_reduce", 2, bytes=4) | {"pid": 1}
    later = [{**e, "ts": e["ts"] + last + 10} for e in events if e["ph"] == "X"]
    (profile,) = read_profiles(written(tmp_path, [*events, other, *later]))
    graphs = list(predicted.graphs.values())
    found = match(graphs, measure(profile), [(0, last + 10), (last + 10, 2 * last + 20)])
    assert (found.match_rate, found.unmatched, len(found.rows)) == (1.0, 1, 9)
    for row in found.rows:
        exposure = row.bucket.exposure
        assert row.duration_us == pytest.approx(exposure.duration_us)
        assert row.gb_s == pytest.approx(64 / 64e3)
    assert "2 steps: 18 of 18 buckets found in the profile (100%)" in str(found)
    assert json.loads(json.dumps(found.to_json()))["buckets"][0]["matched"] == 2
    (profile,) = read_profiles(written(tmp_path, [e for e in events if e.get("cat") != "reduce"]))
    without = match(graphs, measure(profile), [(0, last)])
    assert [bool(row.launches) for row in without.rows].count(True) == 6
    assert without.match_rate == pytest.approx(6 / 9)


def test_a_missing_launch_costs_one_match_of_one_step(tmp_path):
    """Three equal gathers and reduces per graph; one is missing in the first of two steps."""
    predicted = plan("manual")
    graphs = list(predicted.graphs.values())
    length_us = predicted.step.step_us + 100
    events = [e for e in trace_events([predicted])["traceEvents"] if e["ph"] == "X"]
    names = [e for e in trace_events([predicted])["traceEvents"] if e["ph"] == "M"]
    gathers = [e for e in events if e["cat"] == "gather"]
    steps = [[e for e in events if e is not gathers[1]], events]
    moved = [{**e, "ts": e["ts"] + n * length_us} for n, step in enumerate(steps) for e in step]
    (profile,) = read_profiles(written(tmp_path, [*names, *moved]))
    found = match(graphs, measure(profile), [(0, length_us), (length_us, 2 * length_us)])
    short = [row for row in found.rows if len(row.launches) < 2]
    assert [(row.graph, row.bucket.kind) for row in short] == [("forward", "gather")]
    assert (found.rows.index(short[0]), found.unmatched) == (1, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"traceEvents": [{"ph": "X", "na', "the JSON is cut short: Unterminated string"),
        ('{"traceEvents": [', "the JSON is cut short"),
        ("", "the JSON is cut short"),
        ("step 1 loss 2" + 300 * " ", "this is no JSON"),
        ('{"plans": []}', 'an object with "traceEvents"; got keys plans'),
        ('{"traceEvents": []}', "none of its 0 timed events is a collective"),
        (json.dumps([event("nccl:_all_gather_base", 0, 5, "user_annotation")]),
         "it has NCCL's host calls and no GPU kernels"),
        (json.dumps([kernel("gemm", 0, 5)]), "none of its 1 timed events is a collective"),
    ],
)  # fmt: skip
def test_files_that_tell_nothing(tmp_path, text, said):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace.json: .*" + said):
        read_profiles(path)


def test_a_compressed_file_that_is_cut_short(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}' * 50)[:-9])
    with pytest.raises(ValueError, match="the compressed file is cut short"):
        read_profiles(path)


def test_the_command(tmp_path, capsys):
    one = written(tmp_path, [kernel("gemm", 0, 10), kernel(GATHER, 5, 15, 20)])
    two = tmp_path / "two.json"
    two.write_text(json.dumps([kernel("gemm", 0, 10), kernel(GATHER, 5, 25, 20)]))
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", "--trace", str(one), str(two), "--json", str(out)])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "most is exposed on two:" in printed
    assert f"exposed 20 us of 25 us: gather {GATHER}" in printed
    ranks = json.loads(out.read_text())["ranks"]
    assert [(r["name"], r["exposed_us"]) for r in ranks] == [("trace", 10), ("two", 20)]
    assert ranks[0]["collectives"][0]["bytes"] is None


def test_intervals_against_bitmaps():
    rng = random.Random(0)

    def some():
        begins = [rng.randrange(30) for _ in range(rng.randrange(6))]
        return [(b, b + rng.randrange(5)) for b in begins]

    def bits(spans):
        return {t for begin, end in spans for t in range(begin, end)}

    for _ in range(300):
        one, two = some(), some()
        a, b = union(one), union(two)
        assert bits(a) == bits(one) and length(a) == len(bits(one))
        assert bits(intersection(a, b)) == bits(a) & bits(b)
        assert bits(difference(a, b)) == bits(a) - bits(b)


def test_the_document_is_plain_json(tmp_path):
    report = measured(tmp_path, [kernel("gemm", 100, 10), kernel(GATHER, 105, 15, 20)])
    found = json.loads(json.dumps(measured_document(report)))
    assert found["collectives"][0] == {
        "kind": "gather",
        "name": GATHER,
        "begin_us": 0,
        "duration_us": 15,
        "exposed_us": 10,
        "bytes": None,
        "gb_s": None,
    }
