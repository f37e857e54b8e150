"""What ranks decide through the store, on a store in this process: no ranks."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from simplefsdp import rank_guard
from simplefsdp.rank_guard import RankMismatchError, agree, decided, have_the_same
from simplefsdp.words import few_ranks


class Interleaved:
    """A store in which things happen between two requests.

    Attributes:
        before: what is to happen, once, before a key that ends so is written.
        keys: all that were touched.
    """

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.before = {}
        self.keys = []

    def _touch(self, key):
        self.keys.append(key)
        for end in [end for end in self.before if key.endswith(end)]:
            self.before.pop(end)()

    def add(self, key, n):
        self._touch(key)
        return self._store.add(key, n)

    def set(self, key, value):
        self._touch(key)
        self._store.set(key, value)

    def compare_set(self, key, expected, value):
        self._touch(key)
        return self._store.compare_set(key, expected, value)

    def get(self, key):
        self.keys.append(key)
        return self._store.get(key)

    def multi_get(self, keys):
        self.keys += keys
        return self._store.multi_get(keys)

    def check(self, keys):
        return self._store.check(keys)

    def delete_key(self, key):
        return self._store.delete_key(key)

    def there(self):
        """The keys that are there."""
        return {key for key in self.keys if self._store.check([key])}


class World:
    """Ranks that take turns in this process."""

    def __init__(self, monkeypatch) -> None:
        self.store = Interleaved()
        self._rank = threading.local()
        self._groups = {rank: dist.HashStore() for rank in range(8)}  # any object that can die
        monkeypatch.setattr("simplefsdp._torch.shared_store", lambda prefix: self.store)
        monkeypatch.setattr(rank_guard, "dist", self)

    @property
    def group(self):
        return SimpleNamespace(WORLD=self._groups[self.get_rank()])

    def get_rank(self) -> int:
        return self._rank.now

    def on(self, rank, function, *args, **kwargs):
        """Its result, or its error, in words."""
        was = getattr(self._rank, "now", None)
        self._rank.now = rank
        try:
            return str(function(*args, **kwargs))
        except RankMismatchError as error:
            return str(error)
        finally:
            self._rank.now = was


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def arrive(world: World, rank: int, lines=("equal",), ranks=(0, 1)) -> str:
    return world.on(rank, agree, "the graph", list(lines), ranks, timeout_s=0.1)


@pytest.mark.parametrize("end", ["/gave_up", "/verdict"])
def test_a_rank_that_comes_while_another_gives_up(world, end):
    """Between the end of one's patience and its word for it: all go on, or none."""
    late = []
    world.store.before[end] = lambda: late.append(arrive(world, 1))
    waited = arrive(world, 0)
    if not late:
        late.append(arrive(world, 1))
    outcomes = {text == "True" for text in (waited, *late)}
    assert len(outcomes) == 1, (waited, late)


def test_one_outcome_for_those_who_came_and_those_who_come_later(world):
    assert "ranks 1 and 2 did not get to" in arrive(world, 0, ranks=(0, 1, 2))
    for late in (1, 2):
        told = arrive(world, late, ranks=(0, 1, 2))
        assert told == "the graph: rank 0 gave up waiting for ranks 1 and 2"


def test_what_was_agreed_on_is_not_asked_again(world):
    world.store.before["/verdict"] = lambda: arrive(world, 1)
    assert arrive(world, 0) == "True"
    touched = len(world.store.keys)
    assert arrive(world, 0) == arrive(world, 1) == "False"
    assert len(world.store.keys) == touched


def test_nothing_stays_in_the_store_of_turns_long_past(world):
    """What is kept in full is compared in every step."""

    def turns(n: int) -> int:
        for _ in range(n):
            told = []
            world.store.before["/verdict"] = lambda told=told: told.append(
                world.on(1, have_the_same, "it", "same", (0, 1), timeout_s=0.1)
            )
            assert [world.on(0, have_the_same, "it", "same", (0, 1), timeout_s=0.1), *told] == [
                "True",
                "True",
            ]
        return len(world.store.there())

    assert turns(20) == turns(20)


def test_whether_ranks_have_the_same_is_no_error_and_is_asked_each_time(world):
    def one(rank: int, line: str) -> str:
        return world.on(rank, have_the_same, "the file", line, (0, 1), timeout_s=0.1)

    for lines, same in ((("a", "a"), "True"), (("a", "b"), "False"), (("a", "a"), "True")):
        told = []
        world.store.before["/verdict"] = lambda lines=lines, told=told: told.append(
            one(1, lines[1])
        )
        assert [one(0, lines[0]), *told] == [same, same]
    assert "did not get to" in one(0, "a")


def test_a_rank_touches_as_many_keys_as_ever_however_many_ranks_there_are(world):
    def touched(n: int) -> list[int]:
        found = []
        for rank in range(n):
            world.store.keys.clear()
            # All but the last wait in vain here, and are not the ones to count.
            arrive(world, rank, [f"of {n}"], tuple(range(n)))
            found.append(len(world.store.keys))
        return found

    assert touched(8)[-1] == touched(2)[-1]


class Counting:
    """A store that notes which rank called what; ranks are threads."""

    def __init__(self, world: World) -> None:
        self._store, self._world = dist.HashStore(), world
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((self._world.get_rank(), name, args[0]))
            return getattr(self._store, name)(*args)

        return call

    def ranks_that(self, name: str, key: str) -> set[int]:
        """Those that called ``name`` with a key, or a list of keys, of which one holds ``key``."""
        return {rank for rank, called, keys in self.calls if called == name and key in str(keys)}


def meet(world: World, lines_of, absent=()) -> dict[int, str]:
    """What becomes of many ranks that come at the same time, each in a thread of its own."""
    ranks = range(RANKS)
    told, timeout_s = {}, 0.8 if absent else 25.0

    def run(rank: int) -> None:
        told[rank] = world.on(rank, agree, "the graph", lines_of(rank), ranks, timeout_s)

    threads = [threading.Thread(target=run, args=(r,)) for r in ranks if r not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


RANKS = 24


@pytest.fixture
def counting(world, monkeypatch) -> World:
    monkeypatch.setattr(rank_guard, "_PATIENCE_S", 0.4)
    world.store = Counting(world)
    world._groups = {rank: dist.HashStore() for rank in range(RANKS)}
    return world


def test_equal_ranks_ask_the_store_a_few_times_each(counting):
    assert set(meet(counting, lambda rank: ["equal"]).values()) == {"True"}
    meant = [call for call in counting.store.calls if call[1] not in ("wait", "check")]
    assert len(meant) <= 7 * RANKS


def test_only_two_ranks_write_how_they_differ(counting):
    told = meet(counting, lambda rank: ["one", "two" if rank < 7 else f"other {rank}"])
    assert set(told) == set(range(RANKS))
    assert all("rank 0 has 'two', rank 7 has 'other 7'" in text for text in told.values())
    assert counting.store.ranks_that("set", "/lines/") == {0, 7}
    assert len(counting.store.ranks_that("multi_get", "/digest/")) == 1


def test_of_many_who_wait_one_asks_who_is_missing(counting, caplog):
    told = meet(counting, lambda rank: ["equal"], absent=(3, 5))
    assert all("ranks 3 and 5" in text for text in told.values()), told
    assert any("gave up waiting" in text for text in told.values())
    assert re.search(r"the graph: rank \d is waiting for ranks 3 and 5, for up to", caplog.text)
    # The lowest one says it, too, in the log that everybody reads.
    assert len(counting.store.ranks_that("check", "/digest/") - {0}) <= 1


def asks(world: World, rank: int, decide=lambda: "its own", subject=("the same",)) -> str:
    return world.on(rank, decided, "the plan", subject, (0, 1), decide, timeout_s=0.1)


@pytest.fixture
def agreed(world) -> World:
    """Ranks that have agreed what to decide on."""
    for rank in (0, 1):
        known = rank_guard._agreed.setdefault(world._groups[rank], set())
        known.add(((0, 1), rank_guard.digest_of(["the same"])))
    return world


def test_the_lowest_rank_decides(agreed):
    assert asks(agreed, 0, lambda: "first") == asks(agreed, 1) == "first"
    assert asks(agreed, 0, lambda: "second") == asks(agreed, 1) == "second"
    assert agreed.on(0, decided, "alone", [], (0,), lambda: "mine") == "mine"


def test_a_rank_that_alone_forgot_is_told(agreed):
    asks(agreed, 0, lambda: "first")
    assert asks(agreed, 1) == "first"
    told = asks(agreed, 1)
    assert "the plan: after 0.1 s, rank 0 did not get to what rank 1 is about to do" in told
    assert "call torch.compiler.reset() on all ranks or on none" in told
    assert asks(agreed, 0, lambda: "second") == asks(agreed, 1) == "second"


def test_ranks_are_named_as_one_would_say_them():
    assert few_ranks([2]) == "rank 2"
    assert few_ranks([2, 5]) == "ranks 2 and 5"
    assert few_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert few_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more"
    assert few_ranks([]) == "a rank that came too late"


def test_waiting_prints_nothing_of_torchs(monkeypatch, capfd):
    monkeypatch.setattr(rank_guard, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(rank_guard, "dist", SimpleNamespace(get_rank=lambda: 1))
    store = dist.TCPStore("localhost", 0, is_master=True)
    keys = {0: "late"}
    late = threading.Timer(0.3, store.set, ("late", ""))
    late.start()
    rank_guard.wait_for("the graph", store, keys, 5.0, "", speaks=lambda: False)
    late.join()
    with pytest.raises(RankMismatchError, match="rank 0 did not get to what rank 1"):
        rank_guard.wait_for("the graph", store, {0: "never"}, 0.1, "")
    assert capfd.readouterr().err == ""
