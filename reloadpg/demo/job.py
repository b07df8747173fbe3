"""What each rank does: train, offload, generate in the memory that was freed, reload.

A run without offloading computes the same numbers with groups that torch made and reloadpg has
never seen.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import threading
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.elastic.multiprocessing.errors import record

import reloadpg

from .accelerator import Accelerator, accelerator_named
from .exchange import all_reduced_sum, evaluate, expert_rewards, wrong_sums
from .layout import Layout
from .parallel import ParallelGroups
from .rollout import Rollouts, generate, gumbel
from .settings import Settings
from .table import Row
from .task import draw
from .trainer import Trainer

__all__ = ["Job", "main"]

_TIMEOUT = timedelta(minutes=2)
_EVALUATION = 64
Seen = dict[str, Any]


class Job:
    """One rank of one run."""

    def __init__(self, settings: Settings, accelerator: Accelerator, terminal: TextIO) -> None:
        self.settings = settings
        self.terminal = terminal
        self.accelerator = accelerator
        self.rank = dist.get_rank()
        self.trainer = Trainer(settings.ranks, accelerator.device, settings.seed)
        self.parallel = ParallelGroups.create(Layout.of(settings.ranks))
        # A gloo group bypasses: it goes on working while the others are offloaded.
        self.control = dist.new_group(backend="gloo", group_desc="control")
        self.groups = {"WORLD": _world()}
        for name, group in (self.trainer.mesh_groups() | self.parallel.groups).items():
            if group not in self.groups.values():  # a mesh over all ranks has WORLD for a group
                self.groups[name] = group
        self.digits = torch.Generator().manual_seed(settings.seed + 1 + self.rank)
        self.noise = torch.Generator().manual_seed(settings.seed + 100_001 + self.rank)
        shared = torch.Generator().manual_seed(settings.seed)
        self.probes = draw(settings.probes, shared)
        self.evaluation = draw(_EVALUATION, shared)

    def run(self) -> Seen:
        """All iterations; what this rank saw. Collective over all ranks."""
        rollouts, _ = self._generate(self.trainer.weights())
        rewards = self._score(rollouts)
        first_reward = self._mean(rewards)
        cycles = []
        for cycle in range(1, self.settings.cycles + 1):
            seen = {"cycle": cycle, **self._train(rollouts, rewards)}
            weights = self.trainer.weights()
            seen["evaluation"] = self._evaluate(weights).hex()
            if self.settings.offload:
                rollouts, more = self._generate_offloaded(weights, cycle)
            else:
                rollouts, more = self._generate(weights)
            rewards = self._score(rollouts)
            seen |= {**more, "reward": self._mean(rewards)}
            cycles.append(seen)
            self._show(seen)
        final = self.trainer.weights()
        return {
            "rank": self.rank,
            "source": self.parallel.source,
            "groups": {name: dist.get_process_group_ranks(g) for name, g in self.groups.items()},
            "first_reward": first_reward,
            "cycles": cycles,
            # What the last reload built is used like what each one before it built.
            "wrong_sums": wrong_sums(self.groups, self.accelerator.device),
            "final_evaluation": self._evaluate(final).hex(),
            "parameters": _digest(final.values()),
        }

    # -- one iteration -----------------------------------------------------------------------

    def _train(self, rollouts: Rollouts, rewards: Tensor) -> Seen:
        advantages = (rewards - rewards.mean(dim=0)) / (rewards.std() + 1e-6)
        steps = [self.trainer.step(rollouts, advantages) for _ in range(self.settings.steps)]
        return {
            "losses": [loss.hex() for loss, _ in steps],
            "gradient_norms": [norm.hex() for _, norm in steps],
            "mean_loss": self._mean(torch.tensor([loss for loss, _ in steps])),
            "wrong_sums": wrong_sums(self.groups, self.accelerator.device),
        }

    def _generate_offloaded(
        self, weights: Mapping[str, Tensor], cycle: int
    ) -> tuple[Rollouts, Seen]:
        before = self.accelerator.in_use()
        offloaded = reloadpg.offload()
        after = self.accelerator.in_use()
        released = {counter: before[counter] - after[counter] for counter in before}
        usable = [name for name, group in self.groups.items() if self._is_usable(group)]
        rollouts, seen = self._generate(weights, next(iter(released.values())))
        reloaded = reloadpg.reload()
        return rollouts, {
            **seen,
            "groups_offloaded": len(offloaded.groups),
            "groups_reloaded": len(reloaded.groups),
            "released_bytes": released,
            "offload_ms": offloaded.total_ms,
            "reload_ms": reloaded.total_ms,
            "usable_while_offloaded": usable,
            "not_reloaded": [
                name for name, group in self.groups.items() if not _is_reloaded(group, cycle)
            ],
        }

    def _generate(
        self, weights: Mapping[str, Tensor], free_bytes: int = 0
    ) -> tuple[Rollouts, Seen]:
        """This rank's sequences; and the probes, which all ranks must generate alike.

        Uses no group but the control group.
        """
        count = self.settings.rollouts
        noise = gumbel(count + len(self.probes), self.noise)
        noise[count:] = 0
        everything = generate(
            weights,
            torch.cat([draw(count, self.digits), self.probes]),
            noise,
            free_bytes=free_bytes,
            device=self.accelerator.device,
        )
        probes = everything.part(count, count + len(self.probes))
        digests = [""] * self.settings.ranks
        mine = _digest([probes.actions, probes.logprobs])
        dist.all_gather_object(digests, mine, group=self.control)
        seen = {"probes": digests, "buffer_bytes": everything.buffer_bytes}
        return everything.part(0, count), seen

    def _is_usable(self, group: ProcessGroup) -> bool:
        try:
            all_reduced_sum(group, 1.0, self.accelerator.device)
        except reloadpg.GroupOffloadedError:
            return False
        return True

    def _score(self, rollouts: Rollouts) -> Tensor:
        return expert_rewards(rollouts.digits, rollouts.actions, self.parallel.expert)

    def _evaluate(self, weights: Mapping[str, Tensor]) -> float:
        return evaluate(weights, self.evaluation, self.parallel, self.accelerator.device)

    def _mean(self, values: Tensor) -> float:
        """Mean over all ranks, through WORLD."""
        mine = values.double().mean().item()
        return all_reduced_sum(None, mine, self.accelerator.device) / self.settings.ranks

    def _show(self, seen: Seen) -> None:
        everyone: list[Seen] = [{}] * self.settings.ranks
        dist.all_gather_object(everyone, seen, group=self.control)
        if self.rank == 0:
            print(Row.of(everyone).line(self.settings.cycles), file=self.terminal, flush=True)


def _end_with(process: int) -> None:
    """End this process as soon as another one has ended, however that came about.

    A launcher that is killed cannot end its ranks, and they would go on without it.
    """
    ended = os.pidfd_open(process)

    def wait() -> None:
        select.select([ended], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def _take_stdout() -> TextIO:
    """This process's stdout for the demo alone; what others write there goes to stderr.

    Gloo in torch 2.8 writes two lines for each connection that it makes.
    """
    terminal = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return terminal


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the default group is gone; call init_process_group first")
    return world


def _is_reloaded(group: ProcessGroup, generation: int) -> bool:
    return (
        isinstance(group, reloadpg.ReloadableProcessGroup)
        and group.is_live
        and group.generation == generation
    )


def _digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@record
def main(settings: Settings) -> Seen:
    """One rank, from its start to its results. Its error goes to the launcher's error file."""
    warnings.simplefilter("ignore")
    terminal = _take_stdout()
    # A rank that waits in a collective cannot run a handler: on Ctrl-C it is to end at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with(settings.launcher)
    accelerator = accelerator_named(settings.accelerator)
    accelerator.prepare()
    if settings.offload:
        # Groups of one rank hold a communicator too, and small jobs have many of them.
        reloadpg.install(min_size=1, timeout=_TIMEOUT)
    dist.init_process_group(accelerator.backend, timeout=_TIMEOUT)
    result = Job(settings, accelerator, terminal).run()
    dist.destroy_process_group()
    return result
