"""``install`` and ``uninstall``: which names are patched, and what is restored.

``install`` changes the process, so most bodies run in separate rank processes.
"""

from __future__ import annotations

import re
import sys
import threading
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import wrapt
from helpers import early_bindings
from helpers.early_bindings import CREATORS
from helpers.forking import forked
from helpers.jobs import one_cycle
from helpers.worlds import summed
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg.groups.borrowed import recorders
from reloadpg.lifecycle import install
from reloadpg.lifecycle.callbacks import callbacks
from reloadpg.lifecycle.job import jobs

HOMES = (dist, distributed_c10d, device_mesh)
TIMEOUT = timedelta(seconds=20)


def _bound():
    """The values of the creating functions' names, wherever torch binds them."""
    return {
        (home.__name__, name): vars(home)[name]
        for home in HOMES
        for name in CREATORS
        if name in vars(home)
    }


def _assert_torchs_own(before):
    assert all(value is before[key] for key, value in _bound().items())


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(1)
def test_every_name_is_patched_once_and_restored():
    """Also names in modules that imported the function before ``install``, or imported the wrapper
    after it; and methods. Collectives and queries stay torch's own, however a module has imported
    them (failure 2).
    """
    before, early = _bound(), vars(early_bindings)
    own = [dict(vars(home)) for home in HOMES]
    aliases = {name: early[name] for name in CREATORS}
    methods = {(owner, name): vars(owner)[name] for owner, name, _ in recorders()}
    reloadpg.install()
    assert not any(vars(owner)[name] is one for (owner, name), one in methods.items())
    after = _bound()
    assert len(after) >= 6
    for key, value in after.items():
        assert value is not before[key]
        assert isinstance(value, wrapt.FunctionWrapper)
        assert not isinstance(value.__wrapped__, wrapt.ObjectProxy)
    assert all(early[name] is not original for name, original in aliases.items())
    changed = {
        name
        for home, names in zip(HOMES, own, strict=True)
        for name, value in names.items()
        if vars(home)[name] is not value
    }
    # The last one before torch 2.15.
    assert changed <= {*CREATORS, "_new_group_with_tag", "batch_isend_irecv"}
    late = types.ModuleType("late_alias")
    exec("from torch.distributed import new_group", vars(late))
    sys.modules["late_alias"] = late
    reloadpg.uninstall()
    _assert_torchs_own(before)
    assert all(vars(owner)[name] is one for (owner, name), one in methods.items())
    assert all(early[name] is original for name, original in aliases.items())
    assert vars(late)["new_group"] is dist.new_group


@pytest.mark.ranks(1)
def test_second_install():
    """Equal options change nothing (failure 24). Other options raise an error that names them."""
    reloadpg.install(min_size=3)
    wrapper = dist.new_group
    reloadpg.install(min_size=3)
    assert dist.new_group is wrapper
    with pytest.raises(
        reloadpg.errors.PatchConflictError, match=r"min_size=4 \(in place: 3\).*uninst"
    ):
        reloadpg.install(min_size=4)
    assert dist.new_group is wrapper
    assert reloadpg.status().options["min_size"] == 3
    reloadpg.uninstall()
    assert not reloadpg.is_installed()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backends": {"gloo", "nosuch"}}, "nosuch.*gloo"),
        ({"backends": set()}, "backends"),
        *(({"world": world}, "world") for world in ("no", 0, None)),
        ({"strategy": "wishful"}, "wishful.*recreate"),
        ({"strategy": ["recreate"]}, "strategy"),
        *(({"min_size": size}, "min_size") for size in (0, True, 2.5)),
        *(({"timeout": timeout}, "timeout") for timeout in (timedelta(0), "300")),
        *(({"exclude": names}, "exclude") for names in (["TP", ""], [re.compile("TP")])),
        *(({"sets": rules}, "sets") for rules in ("vllm.*", {"engine": 3}, {"engine": [""]})),
        *(({"sets": rules}, "sets") for rules in ({3: "vllm"}, {"": "vllm"}, {None: None})),
        ({"borrowed": "never"}, "refuse, warn or ignore"),
    ],
)
def test_invalid_options_install_nothing(options, said):
    before = _bound()
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=f"(?s){said}") as caught:
        reloadpg.install(**options)
    assert "; nothing was" in str(caught.value)
    assert not reloadpg.is_installed()
    _assert_torchs_own(before)


@pytest.mark.ranks(1)
def test_uninstall_under_another_wrapper_raises_and_changes_nothing():
    """The error names the place and the object that is there."""
    reloadpg.install()
    ours = dist.new_group

    def foreign(*args, **kwargs):
        return ours(*args, **kwargs)

    dist.new_group = foreign
    with pytest.raises(
        reloadpg.errors.PatchConflictError, match=r"torch\.distributed\.new_group.*foreign"
    ):
        reloadpg.uninstall()
    assert dist.new_group is foreign
    assert distributed_c10d.new_group is ours
    assert reloadpg.is_installed()
    dist.new_group = ours
    reloadpg.uninstall()
    assert not reloadpg.is_installed()


@pytest.mark.ranks(2)
def test_another_librarys_wrapper_below_ours_keeps_working():
    """It is called at the creation and at each replay; it stays after ``uninstall``."""
    calls = []

    def trace(wrapped, instance, args, kwargs):
        calls.append(kwargs.get("group_desc"))
        return wrapped(*args, **kwargs)

    # It wraps one of the names only; ``dist.new_group`` stays torch's.
    distributed_c10d.new_group = wrapt.FunctionWrapper(distributed_c10d.new_group, trace)
    before = _bound()
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.init_process_group("gloo")
    traced = distributed_c10d.new_group([0, 1], group_desc="traced")
    plain = dist.new_group([0, 1], group_desc="plain")
    one_cycle()
    assert (traced.generation, plain.generation) == (1, 1)
    dist.destroy_process_group()
    reloadpg.uninstall()
    assert calls == ["traced", "traced"]
    _assert_torchs_own(before)


@pytest.mark.ranks(1)
def test_a_module_that_refuses_assignment_rolls_the_installation_back():
    class Frozen(types.ModuleType):
        def __setattr__(self, name, value):
            raise TypeError("frozen module")

        def __getattr__(self, name):
            raise RuntimeError(f"unexpected look-up of {name}")

    frozen = Frozen("zz_frozen")
    vars(frozen)["new_group"] = dist.new_group
    sys.modules["zz_frozen"] = frozen
    sys.modules["zz_no_module"] = object()
    before = _bound()
    with pytest.raises(TypeError, match="frozen module"):
        reloadpg.install()
    assert not reloadpg.is_installed()
    _assert_torchs_own(before)


@pytest.mark.matrix
@pytest.mark.skipif(
    not hasattr(distributed_c10d, "_use_torchcomms_enabled"), reason="this torch has no TorchComms"
)
def test_install_refuses_torchcomms(monkeypatch):
    """With torch's switches set as where torchcomms is installed and enabled."""
    monkeypatch.setattr(distributed_c10d, "_TORCHCOMM_AVAILABLE", True)
    monkeypatch.setattr(torch.distributed.config, "use_torchcomms", True)
    with pytest.raises(
        reloadpg.errors.InvalidOptionError, match=r"TorchComms .* Nothing was installed"
    ):
        reloadpg.install()
    assert not reloadpg.is_installed()


def test_an_unknown_variable_that_is_empty_counts_as_unset(monkeypatch):
    monkeypatch.setenv("RELOADPG_FUTURE", "")
    reloadpg.install()
    assert reloadpg.is_installed()
    reloadpg.uninstall()


@pytest.mark.ranks(1)
def test_no_lock_is_held_while_a_callback_of_the_installation_runs(monkeypatch):
    """While ``install`` starts the observer, at a second call, too, and while ``uninstall`` calls
    back, another thread can register the job.
    """
    ended = []

    def elsewhere():
        thread = threading.Thread(target=jobs.current, args=("test",))
        thread.start()
        thread.join(60.0)
        ended.append(not thread.is_alive())

    monkeypatch.setattr(install, "observers", [elsewhere])
    callbacks.uninstall.append(elsewhere)
    reloadpg.install(backends="gloo", min_size=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reloadpg.install(backends="gloo", min_size=1)
    reloadpg.uninstall()
    assert ended == [True] * 3


@pytest.mark.ranks(2)
def test_uninstall_while_offloaded_is_refused(rank):
    """After a reload it succeeds, and the groups still work."""
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.init_process_group("gloo")
    reloadpg.offload()
    with pytest.raises(reloadpg.errors.PatchConflictError, match=r"reload\(\)"):
        reloadpg.uninstall()
    assert reloadpg.is_installed()
    reloadpg.reload()
    reloadpg.uninstall()
    assert isinstance(dist.group.WORLD, reloadpg.ReloadableProcessGroup)
    assert summed(None, rank) == 3


@pytest.mark.ranks(2)
def test_a_forked_child_has_none_of_the_parents_groups(rank):
    """It keeps the patches, and can neither offload nor use them (failure 25). Destroying them
    returns: their threads are the parent's, which is not affected.
    """
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])

    def child():
        assert reloadpg.is_installed()
        assert reloadpg.status().groups == ()
        with pytest.raises(reloadpg.ReloadpgError, match="belong to the parent"):
            reloadpg.offload()
        for used in (None, group):
            with pytest.raises(reloadpg.GroupOffloadedError, match="forked"):
                dist.all_reduce(torch.ones(1), group=used)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return summed(None, rank)

    assert forked(child) == str(rank + 1.0)
    assert summed(group, rank) == 3
    one_cycle()
    assert summed(group, rank) == 3
    assert dist.group.WORLD.generation == 1


class _Ranks(list):
    """A list of ranks that creates its group."""


@pytest.mark.ranks(1)
def test_a_patched_function_in_a_class_binds_its_instance():
    reloadpg.install(backends={"fake"})
    _Ranks.create = dist.new_group
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    made = _Ranks([0, 3]).create(group_desc="of a class")
    one_cycle()
    assert isinstance(made, reloadpg.ReloadableProcessGroup)
    assert (made.group_desc, made.generation, made.size()) == ("of a class", 1, 2)
    dist.destroy_process_group()
