"""install, uninstall, is_installed: what is patched, where, and how it comes off again.

Everything here changes the process, so each body runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import types
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import wrapt
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg.cli.doctor import diagnose
from reloadpg.groups.registry import registry
from reloadpg.testing import run_ranks

CREATORS = ("new_group", "split_group", "init_process_group")
HOMES = (dist, distributed_c10d, device_mesh)


def _load_early_alias():
    spec = importlib.util.spec_from_file_location(
        "early_alias", Path(__file__).parents[1] / "helpers" / "early_alias.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["early_alias"] = module
    spec.loader.exec_module(module)
    return module


def _bound():
    """What the creating functions' names hold, wherever torch binds them."""
    return {
        (home.__name__, name): vars(home)[name]
        for home in HOMES
        for name in CREATORS
        if name in vars(home)
    }


def _patches_every_name(rank, world_size):
    early = _load_early_alias()
    before = _bound()
    early_before = dict(vars(early))
    reloadpg.install()
    after = _bound()
    unpatched = [key for key, value in after.items() if value is before[key]]
    aliases_changed = [
        name
        for name in ("new_group", "split_group", "start")
        if vars(early)[name] is not early_before[name]
    ]
    layers = {
        key: isinstance(value, wrapt.FunctionWrapper)
        and not isinstance(value.__wrapped__, wrapt.ObjectProxy)
        for key, value in after.items()
    }
    others = [
        name
        for name in ("all_reduce", "get_rank", "barrier", "destroy_process_group")
        if isinstance(getattr(dist, name), wrapt.ObjectProxy)
    ]
    late = types.ModuleType("late_alias")
    exec("from torch.distributed import new_group", vars(late))
    sys.modules["late_alias"] = late
    reloadpg.uninstall()
    restored = all(value is before[key] for key, value in _bound().items())
    aliases_restored = all(
        vars(early)[name] is early_before[name] for name in ("new_group", "split_group", "start")
    )
    return {
        "names": len(before),
        "unpatched": unpatched,
        "aliases": aliases_changed,
        "one_layer": all(layers.values()),
        "others": others,
        "restored": restored and aliases_restored,
        "late_restored": vars(late)["new_group"] is dist.new_group,
    }


def test_every_name_is_patched_once_and_restored():
    """Every name of a creating function in torch's modules, and in modules that imported it early.

    One wrapt layer each; collectives and queries are torch's own. Uninstall leaves the original
    object, also at names that imported the wrapper after install.
    """
    (patched,) = run_ranks(_patches_every_name, 1)
    assert patched.pop("names") >= 6
    assert patched == {
        "unpatched": [],
        "aliases": ["new_group", "split_group", "start"],
        "one_layer": True,
        "others": [],
        "restored": True,
        "late_restored": True,
    }


def _install_twice(rank, world_size):
    first = reloadpg.install(min_size=3)
    wrapper = dist.new_group
    second = reloadpg.install(min_size=3)
    same = dist.new_group is wrapper
    with second:
        pass
    still = reloadpg.is_installed()
    with first:
        pass
    return same, still, reloadpg.is_installed()


def test_install_twice_with_equal_options_is_a_no_op():
    """The framework and its dependency both install (failure 24): one wrapper, one owner."""
    assert run_ranks(_install_twice, 1) == [(True, True, False)]


def _conflict(rank, world_size):
    reloadpg.install(min_size=2)
    wrapper = dist.new_group
    try:
        reloadpg.install(min_size=4)
    except reloadpg.PatchConflictError as error:
        return str(error), dist.new_group is wrapper, reloadpg.status().options["min_size"]
    return None


def test_install_with_other_options_is_an_error_that_changes_nothing():
    """The message has the options that differ, with both values, and says what to call."""
    text, same, min_size = run_ranks(_conflict, 1)[0]
    assert "other options: min_size=4 (in place: 2). Nothing was changed." in text
    assert "uninstall()" in text
    assert same
    assert min_size == 2


def _bad_options(rank, world_size):
    found = {}
    before = _bound()
    cases = {
        "backend": {"backends": {"gloo", "nosuch"}},
        "empty": {"backends": set()},
        "strategy": {"strategy": "wishful"},
        "strategy type": {"strategy": ["recreate"]},
        "size": {"min_size": 0},
        "bool size": {"min_size": True},
        "float size": {"min_size": 2.5},
        "timeout": {"timeout": timedelta(0)},
        "timeout type": {"timeout": "300"},
        "exclude": {"exclude": ["TP", ""]},
        "exclude type": {"exclude": [re.compile("TP")]},
    }
    for name, options in cases.items():
        try:
            reloadpg.install(**options)
        except ValueError as error:
            found[name] = (isinstance(error, reloadpg.ReloadpgError), str(error))
    return found, reloadpg.is_installed(), all(v is before[k] for k, v in _bound().items())


def test_bad_options_are_named_and_nothing_is_installed():
    """Unknown backend or strategy, min_size below 1, a timeout that is none: ValueError."""
    found, installed, untouched = run_ranks(_bad_options, 1)[0]
    assert sorted(found) == [
        "backend",
        "bool size",
        "empty",
        "exclude",
        "exclude type",
        "float size",
        "size",
        "strategy",
        "strategy type",
        "timeout",
        "timeout type",
    ]
    assert all(ours for ours, _ in found.values())
    assert "nosuch" in found["backend"][1]
    assert "gloo" in found["backend"][1]  # what is known is listed
    assert "recreate" in found["strategy"][1]
    assert not installed
    assert untouched


def _foreign_over_ours(rank, world_size):
    reloadpg.install()
    ours = dist.new_group

    def foreign(*args, **kwargs):
        return ours(*args, **kwargs)

    dist.new_group = foreign
    try:
        reloadpg.uninstall()
        text = ""
    except reloadpg.PatchConflictError as error:
        text = str(error)
    held = dist.new_group is foreign and distributed_c10d.new_group is ours
    installed = reloadpg.is_installed()
    dist.new_group = ours
    reloadpg.uninstall()
    return text, held, installed, reloadpg.is_installed()


def test_uninstall_under_a_foreign_wrapper_is_an_error_that_changes_nothing():
    """It names the place and what is there; once that is gone, uninstall works."""
    text, held, installed, after = run_ranks(_foreign_over_ours, 1)[0]
    assert "torch.distributed.new_group" in text
    assert "foreign" in text
    assert held
    assert installed
    assert not after


def _foreign_below(rank, world_size):
    original = distributed_c10d.new_group
    calls = []

    def trace(wrapped, instance, args, kwargs):
        calls.append(kwargs.get("group_desc"))
        return wrapped(*args, **kwargs)

    # The other library has wrapped one name of several.
    distributed_c10d.new_group = wrapt.FunctionWrapper(original, trace)
    before = _bound()
    reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo")
    traced = distributed_c10d.new_group([0, 1], group_desc="traced")
    plain = dist.new_group([0, 1], group_desc="plain")
    reloadpg.offload()
    reloadpg.reload()
    generations = [traced.generation, plain.generation]
    dist.destroy_process_group()
    reloadpg.uninstall()
    return calls, generations, all(v is before[k] for k, v in _bound().items())


def test_a_foreign_wrapper_below_ours_goes_on_working():
    """It sees creation and replay; names that it left out are patched too; LIFO undo."""
    for calls, generations, restored in run_ranks(_foreign_below, 2):
        assert calls == ["traced", "traced"]
        assert generations == [1, 1]
        assert restored


def _failing_module(rank, world_size):
    class Frozen(types.ModuleType):
        def __setattr__(self, name, value):
            raise TypeError("frozen module")

        def __getattr__(self, name):
            raise RuntimeError(f"do not ask me for {name}")

    frozen = Frozen("zz_frozen")
    vars(frozen)["new_group"] = dist.new_group
    sys.modules["zz_frozen"] = frozen
    sys.modules["zz_no_module"] = object()
    before = _bound()
    try:
        reloadpg.install()
        text = ""
    except TypeError as error:
        text = str(error)
    return text, reloadpg.is_installed(), all(v is before[k] for k, v in _bound().items())


def test_a_name_that_cannot_be_patched_rolls_everything_back():
    """A module that refuses assignment: torch's functions stay everywhere."""
    assert run_ranks(_failing_module, 1) == [("frozen module", False, True)]


def _install_after_init(rank, world_size):
    dist.init_process_group("gloo", timeout=timedelta(seconds=123))
    raw = dist.group.WORLD
    sub = dist.new_group([0, 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=20))
    world = dist.group.WORLD
    reloadpg.offload()
    reloadpg.reload()
    return {
        "taken_over": isinstance(world, reloadpg.ReloadableProcessGroup) and world is not raw,
        "generation": world.generation,
        "timeout": reloadpg.status().groups[0].timeout_s,
        "sub": type(sub) is dist.ProcessGroup,
        "warned": [str(w.message) for w in caught if "before reloadpg.install" in str(w.message)],
        "same": dist.group.WORLD is world,
    }


def test_install_after_init_takes_world_over_and_warns_of_older_groups():
    """WORLD becomes reloadable with its own timeout; groups made before stay torch's."""
    for result in run_ranks(_install_after_init, 2):
        assert result["taken_over"]
        assert result["generation"] == 1
        assert result["timeout"] == 123
        assert result["sub"]
        assert result["same"]
        assert len(result["warned"]) == 1
        assert "1 process group ('1' (ranks 0-1))" in result["warned"][0]


def test_a_torch_that_was_not_tested_is_warned_of_once(monkeypatch):
    """By install(), which works all the same; a tested one is not."""
    monkeypatch.setattr(registry, "warned", set())
    for version, warned in (("2.15.9", 0), ("2.16.0.dev20990101+cpu", 1), ("2.7.1", 0)):
        monkeypatch.setattr(torch, "__version__", version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with reloadpg.install():
                assert reloadpg.is_installed()
        said = [str(w.message) for w in caught if "is not supported" in str(w.message)]
        assert len(said) == warned
        assert all("tested with 2.8 to 2.15" in text and version in text for text in said)
        if said:
            assert caught[0].filename == __file__


def test_torchcomms_is_refused_where_torch_hangs_with_it(monkeypatch):
    """Before 2.15: the switches of torch are set as where torchcomms is installed and enabled."""
    monkeypatch.setattr(distributed_c10d, "_TORCHCOMM_AVAILABLE", True)
    monkeypatch.setattr(torch.distributed.config, "use_torchcomms", True)
    with pytest.raises(reloadpg.InvalidOptionError, match=r"TorchComms .* Nothing was installed"):
        reloadpg.install()
    assert not reloadpg.is_installed()
    (found,) = [one for one in diagnose().findings if one.check == "torchcomms"]
    assert found.level == "problem"
    assert "Unset the variable" in found.remedy


def test_an_unknown_variable_is_refused_by_install(monkeypatch):
    """With the name that it may be meant to be; nothing is installed. An empty one is unset."""
    monkeypatch.setenv("RELOADPG_STATUSDIR", "/tmp")
    monkeypatch.setenv("RELOADPG_FUTURE", "")
    with pytest.raises(
        reloadpg.InvalidOptionError,
        match=r"^install: the environment has RELOADPG_STATUSDIR \(did you mean "
        r"RELOADPG_STATUS_DIR\?\), which reloadpg does not know; nothing was changed",
    ):
        reloadpg.install()
    assert not reloadpg.is_installed()
    monkeypatch.delenv("RELOADPG_STATUSDIR")
    reloadpg.install().uninstall()


def _uninstall_while_offloaded(rank, world_size):
    reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo")
    reloadpg.offload()
    try:
        reloadpg.uninstall()
        text = ""
    except reloadpg.PatchConflictError as error:
        text = str(error)
    installed = reloadpg.is_installed()
    reloadpg.reload()
    reloadpg.uninstall()
    world = dist.group.WORLD
    import torch

    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return text, installed, isinstance(world, reloadpg.ReloadableProcessGroup), tensor.item()


def test_uninstall_while_offloaded_is_refused_and_groups_outlive_it():
    """It says to reload first; afterwards the groups made meanwhile go on working."""
    for text, installed, proxy, total in run_ranks(_uninstall_while_offloaded, 2):
        assert "reload()" in text
        assert installed
        assert proxy
        assert total == 2


def _in_forked_child(body):
    """Run body in a forked child; what it returned, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            text = repr(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def _fork_with_job(rank, world_size):
    reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo")

    def child():
        status = reloadpg.status()
        try:
            reloadpg.offload()
        except reloadpg.ReloadpgError as error:
            return reloadpg.is_installed(), len(status.groups), str(error)
        return "offloaded the parent's groups"

    text = _in_forked_child(child)
    reloadpg.offload()
    reloadpg.reload()
    return text, dist.group.WORLD.generation


def test_a_forked_child_keeps_the_patches_and_cannot_touch_the_parents_groups():
    """It inherits sockets, not a job (failure 25); the parent goes on undisturbed."""
    for text, generation in run_ranks(_fork_with_job, 2):
        assert text.startswith("(True, 0, ")
        assert "belong to the parent" in text
        assert generation == 1


def _fork_before_init(rank, world_size):
    reloadpg.install(backends={"gloo"}, min_size=1, timeout=timedelta(seconds=20))

    def child():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        reloadpg.offload()
        reloadpg.reload()
        return dist.group.WORLD.generation

    return _in_forked_child(child), reloadpg.status().initialized


def test_a_forked_child_can_have_a_job_of_its_own():
    """Installed in the parent, used in the child, as multiprocessing's fork does it."""
    assert run_ranks(_fork_before_init, 1) == [("1", False)]


def _spawned(rank, world_size):
    installed = reloadpg.is_installed()
    with reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=20)):
        dist.init_process_group("gloo")
        reloadpg.offload()
        reloadpg.reload()
        generation = dist.group.WORLD.generation
    dist.destroy_process_group()
    return installed, generation


@pytest.mark.slow
def test_a_spawned_child_installs_for_itself():
    """A fresh interpreter starts unpatched."""
    assert run_ranks(_spawned, 2, start_method="spawn") == [(False, 1)] * 2


class _Ranks(list):
    """A list of ranks that creates its group."""


def _created_from_a_class(rank, world_size):
    with reloadpg.install(backends={"fake"}):
        _Ranks.create = dist.new_group
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        made = _Ranks([0, 3]).create(group_desc="of a class")
        reloadpg.offload()
        reloadpg.reload()
        facts = type(made).__name__, made.group_desc, made.generation, dist.get_world_size(made)
        dist.destroy_process_group()
    return facts


def test_a_function_that_is_kept_in_a_class_is_bound_as_torchs_is():
    """Found through an instance, it gets the instance as its first argument."""
    facts = run_ranks(_created_from_a_class, 1)[0]
    assert facts == ("ReloadableProcessGroup", "of a class", 1, 2)
