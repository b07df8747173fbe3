"""The record of a creating call: a verbatim copy, in the same order on all ranks."""

from __future__ import annotations

import array
import collections
import contextlib
import random
import sys
from datetime import timedelta
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg.c10d import backends, creation, tables
from reloadpg.groups.creation import (
    WORLD_ORDER,
    Call,
    Construction,
    by_members,
    group_order,
    thread,
    verbatim,
)


def _record(*args, **kwargs):
    return args, kwargs


def test_a_call_is_copied_at_its_capture_and_at_each_replay():
    """A replayed function can change its lists, nested lists too (failure 11). Torch accepts a
    generator of ranks, which can be read once; a range stays a range.
    """
    given = [0, 1, 2]
    call = Call.capture(_record, (given, iter([1, 0]), range(2)), {"split_ranks": [[0, 1], [2]]})
    given.clear()
    for _ in range(2):
        args, kwargs = call()
        assert args == ([0, 1, 2], [1, 0], range(2))
        assert kwargs == {"split_ranks": [[0, 1], [2]]}
        args[0].clear()
        kwargs["split_ranks"][0].clear()
    with pytest.raises(TypeError):
        call.kwargs["split_ranks"] = []


def test_the_options_of_a_group_are_those_of_its_first_backend_other_than_gloo():
    """A replay passes them on, and torch accepts no others for NCCL."""
    expected, gloo = object(), dist.ProcessGroupGloo._Options()

    options = {"cpu": gloo, "cuda": expected, "xpu": object(), "meta": None}
    group = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(options=options[device.type])
    )
    assert backends.options_of(group, ["cpu", "meta", "cuda", "xpu"]) is expected
    assert backends.options_of(group, ["cpu", "meta"]) is None


def test_verbatim_blocks_nest():
    """A function given to ``register_group()`` may contain one."""
    with verbatim():
        with verbatim():
            pass
        assert thread.verbatim
    assert not thread.verbatim


def test_world_comes_first_and_counters_before_hashes():
    """One total order over both kinds of names; counters are ordered as numbers."""
    orders = [WORLD_ORDER, group_order("3"), group_order("12"), group_order("0fa9")]
    shuffled = orders[:]
    random.Random(3).shuffle(shuffled)
    assert sorted(shuffled) == orders
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("options", [None, SimpleNamespace(), SimpleNamespace(split_from="gone")])
def test_a_split_is_replayed_as_a_new_group(options):
    """Torch keeps the parent in NCCL's options, and would split from it again."""
    again = by_members((2, 0), None, "nccl", "", options)
    assert again.kwargs["ranks"] == [2, 0]
    assert again.kwargs["pg_options"] is options
    creation.forget_parent(options)
    assert getattr(options, "split_from", None) is None


@pytest.mark.parametrize("given", [{}, {"timeout": timedelta(seconds=5), "pg_options": "own"}])
def test_a_split_has_its_parents_options_and_timeout_without_its_own(given):
    parents = "the parent's", timedelta(seconds=7)
    call = Call(_record, (), given)
    made = Construction(call, tables.Entry("7", {0: 0}, "gloo", ""), (), 0, parents)
    assert (made.options, made.timeout) == (("own", timedelta(seconds=5)) if given else parents)


RANKS = {
    "array": lambda: array.array("i", [1, 0]),
    "deque": lambda: collections.deque([1, 0]),
    "dict keys": lambda: {1: "a", 0: "b"}.keys(),
    "dict values": lambda: {"a": 1, "b": 0}.values(),
    "generator": lambda: (rank for rank in (1, 0)),
    "list": lambda: [1, 0],
    "list of numpy": lambda: [numpy.int64(1), numpy.int64(0)],
    "numpy": lambda: numpy.array([1, 0]),
    "range": lambda: range(1, -1, -1),
    "set": lambda: {1, 0},
    "tensor": lambda: torch.tensor([1, 0]),
    "tuple": lambda: (1, 0),
    "UserList": lambda: collections.UserList([1, 0]),
}


@pytest.mark.parametrize("kind", RANKS)
def test_any_container_of_ranks_is_copied(kind):
    """A change by the caller after the call changed every replay (failure 11)."""
    given = RANKS[kind]()
    call = Call.capture(_record, (given,), {"ranks": given if kind != "generator" else [1, 0]})
    for change in ("clear", "reverse"):
        with contextlib.suppress(AttributeError):
            getattr(given, change)()
    if kind in ("numpy", "tensor"):
        given[:] = 7
    if kind.startswith("dict"):
        given = None
    for _ in range(2):
        args, kwargs = call()
        assert sorted(int(rank) for rank in args[0]) == [0, 1]
        assert sorted(int(rank) for rank in kwargs["ranks"]) == [0, 1]


@pytest.mark.parametrize("args", [([0, 1], None), ()])
def test_arguments_below_a_wrapper_without_a_signature_are_found_by_keyword(args):
    """Another library's wrapper may take ``*args, **kwargs``."""
    call = Call.capture(_record, args, {"backend": "nccl", "pg_options": "theirs"})
    assert call.given == {"backend": "nccl", "pg_options": "theirs"}
    assert call.replacing("backend", "gloo")() == (
        args,
        {"backend": "gloo", "pg_options": "theirs"},
    )


# ---------------------------------------------------------------------------------------------
# cost of a creation, in calls


class _CountingList(list):
    """A list that counts the elements that are read from it."""

    read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)

    def __iter__(self):
        for value in super().__iter__():
            self.read += 1
            yield value


def _calls(action):
    """The Python functions that it calls, and itself."""
    found = []
    sys.setprofile(lambda frame, event, _: event == "call" and found.append(frame.f_code.co_name))
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


class _AppendedTo(list):
    """A list to which another thread appends an item, after the first one was read."""

    other = None

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.other is not None:
            self.append(self.other)
            self.other = None
        return item


@pytest.mark.ranks(1)
def test_a_group_that_another_thread_creates_stays_in_torchs_list():
    """While the proxy takes the place of its group there."""
    reloadpg.install(backends={"fake"})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    tags = dist.distributed_c10d._world.tags_to_pg
    before = list(tags.setdefault("", []))
    tags[""] = _AppendedTo(before)
    tags[""].other = other = "the group of another thread"
    group = dist.new_group([0, 1])
    seen, tags[""] = list(tags[""]), before
    assert seen == [*before, group, other]


@pytest.mark.matrix
@pytest.mark.ranks(1)
def test_the_cost_of_a_creation_depends_on_no_size():
    """Every rank calls ``new_group`` for every group of the job: 100,000 times in a large one.

    A member builds no record before an operation reads it, then from a snapshot that was taken at
    the call, and looks at no other group: the proxy takes its group's place from the end of torch's
    list. A group that another library makes by hand has its own ranks.
    """
    others = [list(range(2)), list(range(1_000))]
    lists = [*others, [9_998, 9_999], list(range(9_000, 10_000))]

    def counted():
        dist.init_process_group("fake", rank=9_999, world_size=10_000, store=FakeStore())
        dist.new_group([0, 1])
        return [_calls(lambda ranks=ranks: dist.new_group(ranks)) for ranks in lists]

    torchs = counted()
    dist.destroy_process_group()
    reloadpg.install(backends={"fake"})
    ours = counted()
    few, many, member, members = map(int.__sub__, map(len, ours), map(len, torchs))
    assert few == many
    assert 0 < few <= 9  # three of them are WORLD's rank and size
    assert member == members <= 42  # six of them record the device, where CUDA is built in
    assert {"take_place"} < {*ours[-1]}
    assert not {"of", "given", "group_order"} & {*ours[-1]}

    held = [dist.new_group([0, 9_999]) for _ in range(100)]
    tags = dist.distributed_c10d._world.tags_to_pg
    tags[""] = _CountingList(tags[""])
    held += [dist.new_group([0, 9_999]) for _ in range(10)]
    assert tags[""].read <= 20
    proxies = sum(isinstance(group, reloadpg.ReloadableProcessGroup) for group in tags[""])
    assert proxies == 113  # WORLD is one, and two were counted

    ranks = [0, 9_999]
    group = dist.new_group(ranks)
    ranks[0] = 5
    assert group._managed.construction.call.args == ([0, 9_999],)
    by_hand, _ = dist.distributed_c10d._new_process_group_helper(
        *(2, 1, [0, 9_999], "fake", FakeStore(), "by hand"), timeout=timedelta(seconds=60)
    )
    assert tables.entry_of(by_hand)[:2] == ("by hand", {0: 0, 1: 1})
