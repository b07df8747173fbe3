"""The record of a creating call: frozen, verbatim, ordered alike on all ranks."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from reloadpg import c10d
from reloadpg.construction import (
    WORLD_ORDER,
    Call,
    Construction,
    split_order,
    subgroup_order,
)


def _record(*args, **kwargs):
    return args, kwargs


def _construction(call, **changes):
    fields = {
        "name": "7",
        "ranks": (0, 1),
        "backend": "cpu:gloo,cuda:nccl",
        "devices": {"cpu": "gloo", "cuda": "nccl"},
        "selected": ("cpu", "cuda"),
        "order": subgroup_order("7"),
    }
    return Construction(call, **{**fields, **changes})


def test_a_rank_list_changed_by_the_caller_does_not_change_the_replay():
    """The list is copied at capture (failure 11), nested lists too, and again at each replay."""
    ranks, splits = [0, 1, 2], [[0, 1], [2]]
    call = Call.capture(_record, (ranks,), {"split_ranks": splits})
    ranks.append(9)
    splits[0].append(9)
    first_args, first_kwargs = call()
    assert first_args == ([0, 1, 2],)
    assert first_kwargs == {"split_ranks": [[0, 1], [2]]}
    first_args[0].clear()
    first_kwargs["split_ranks"].clear()
    assert call() == (([0, 1, 2],), {"split_ranks": [[0, 1], [2]]})


def test_positional_stays_positional_and_objects_stay_the_same_objects():
    """timeout and pg_options are the caller's own; nothing is filled in."""
    options, timeout = object(), timedelta(minutes=120)
    args, kwargs = Call.capture(_record, ((0, 1), timeout), {"pg_options": options})()
    assert args == ((0, 1), timeout)
    assert args[1] is timeout
    assert kwargs == {"pg_options": options}
    assert kwargs["pg_options"] is options


def test_an_iterator_of_ranks_is_drained_once_and_replayed():
    """A generator works for torch, so it must work twice for us; a range stays a range."""
    call = Call.capture(_record, (iter([1, 0]), range(2)), {})
    assert call() == (([1, 0], range(2)), {})
    assert call() == (([1, 0], range(2)), {})


def test_captured_keywords_are_read_only():
    """Nobody changes a construction by accident."""
    call = Call.capture(_record, (), {"backend": "nccl"})
    with pytest.raises(TypeError):
        call.kwargs["backend"] = "gloo"


@given(st.lists(st.integers(0, 10**6), unique=True), st.randoms())
def test_groups_sort_by_torchs_counter_not_by_text(numbers, rng):
    """Names are decimal text; '10' comes after '9', whatever order the ranks list them in."""
    names = [str(number) for number in numbers]
    rng.shuffle(names)
    assert sorted(names, key=subgroup_order) == [str(n) for n in sorted(numbers)]


def test_parents_come_before_their_splits_and_world_before_all():
    """One total order over counters, hashes and splits; ties are impossible."""
    parent, hashed = subgroup_order("12"), subgroup_order("0fa9")
    orders = [
        WORLD_ORDER,
        subgroup_order("3"),
        parent,
        hashed,
        split_order(WORLD_ORDER, 0),
        split_order(WORLD_ORDER, 1),
        split_order(parent, 0),
        split_order(hashed, 0),
        split_order(split_order(parent, 0), 0),
    ]
    shuffled = orders[:]
    random.Random(3).shuffle(shuffled)
    result = sorted(shuffled)
    assert result[0] == WORLD_ORDER
    assert result.index(parent) < result.index(split_order(parent, 0))
    assert result.index(split_order(parent, 0)) < result.index(
        split_order(split_order(parent, 0), 0)
    )
    assert len(set(orders)) == len(orders)


def test_a_mixed_group_replays_only_its_released_backends():
    """The CPU side never went away; making gloo again and again leaks host memory (failure 31)."""

    def new_group(*args, **kwargs):
        return args, kwargs

    keyword = _construction(
        Call.capture(new_group, ([0, 1],), {"backend": "cpu:gloo,cuda:nccl"}), selected=("cuda",)
    )
    assert keyword.is_mixed
    assert keyword.kept == ("cpu",)
    assert keyword._create() == (([0, 1],), {"backend": "cuda:nccl"})
    positional = _construction(
        Call.capture(new_group, ([0, 1], None, "cpu:gloo,cuda:nccl", None), {}),
        selected=("cuda",),
    )
    assert positional._create() == (([0, 1], None, "cuda:nccl", None), {})
    implied = _construction(Call.capture(new_group, ([0, 1],), {}), selected=("cuda",))
    assert implied._create() == (([0, 1],), {"backend": "cuda:nccl"})


def test_the_digest_covers_what_members_must_agree_on():
    """Name, members, backends and order; equal inputs give equal digests of 40 bits."""
    call = Call.capture(_record, (), {})
    base = _construction(call)
    assert base.digest == _construction(call).digest
    assert 0 <= base.digest < 2**40
    others = [
        _construction(call, name="8"),
        _construction(call, ranks=(0, 2)),
        _construction(call, devices={"cpu": "gloo", "cuda": "gloo"}),
        _construction(call, order=subgroup_order("9")),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize("options", [None, SimpleNamespace(), SimpleNamespace(split_from="gone")])
def test_a_group_made_without_its_parent_does_not_look_for_it(monkeypatch, options):
    """Torch leaves the parent in NCCL's options; shown for the call, not on real NCCL."""
    received = []

    def new_group(ranks, **kwargs):
        parent = getattr(kwargs["pg_options"], "split_from", None)
        received.append((ranks, kwargs["pg_options"], parent, kwargs["use_local_synchronization"]))

    monkeypatch.setattr(distributed_c10d, "new_group", new_group)
    c10d.create_among_members((2, 0), backend="nccl", options=options, timeout=None, desc=None)
    assert received == [([2, 0], options, None, True)]
