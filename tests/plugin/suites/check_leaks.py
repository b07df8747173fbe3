"""Tests of somebody else's project, run by ``test_plugin.py``: what they leave behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import reloadpg

SINGLE = {"rank": 0, "world_size": 1}


def initialized(backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), **SINGLE)


def used(group=None) -> None:
    dist.all_reduce(torch.ones(1), group=group)


@pytest.fixture
def ended():
    """For tests that leave what the plugin is to find: the next test must start clean."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("simulated_accelerator", [{"bytes_per_communicator": 8192}], indirect=True)
def test_sim_is_set_up(simulated_accelerator):
    initialized("sim")
    used()
    assert simulated_accelerator.stats().held_bytes == 8192
    simulated_accelerator.inject(simulated_accelerator.Fault(at="collective", times=None))
    dist.destroy_process_group()


def test_sim_is_as_before(simulated_accelerator):
    initialized("sim")
    used()  # no fault of the test before
    assert simulated_accelerator.stats().held_bytes == 1 << 20
    dist.destroy_process_group()


def test_settings_are_taken_back():
    from reloadpg.testing import simulated

    initialized("sim")
    used()
    assert simulated.stats().held_bytes == simulated.DEFAULT_BYTES
    dist.destroy_process_group()


def test_sim_communicator_left(ended, simulated_accelerator):
    initialized("sim")
    used()


def test_no_leak(assert_no_group_leaks):
    initialized("gloo")
    with assert_no_group_leaks():
        dist.destroy_process_group(dist.new_group([0]))
    dist.destroy_process_group()


def test_leak_around_the_test(ended, assert_no_group_leaks):
    initialized("gloo")


def test_leak_in_a_block(assert_no_group_leaks):
    initialized("gloo")
    try:
        with assert_no_group_leaks():
            dist.new_group([0], group_desc="left over")
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_reloadable_groups_and_communicators_left_on_ranks(
    simulated_accelerator, assert_no_group_leaks
):
    reloadpg.install(backends={"sim"})
    dist.init_process_group("sim")
    used()


@pytest.mark.ranks(2, backend="sim")
def test_nothing_left_on_ranks(simulated_accelerator, assert_no_group_leaks):
    reloadpg.install(backends={"sim"})
    group = dist.new_group([0, 1])
    used(group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_body_failure_is_told_first(simulated_accelerator, assert_no_group_leaks):
    dist.init_process_group("sim")
    used()
    raise LookupError("of the body")
