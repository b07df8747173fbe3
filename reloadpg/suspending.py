"""Suspend and resume within an operation: choose, do it on all ranks alike, or fall back.

A communicator that fails to suspend or to resume on one rank leaves its peers hanging in the
backend. They hear of it through the store; then all ranks drop the communicators that were to be
kept and go on in a new round, in which these groups are recreated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from . import c10d, memory
from .choice import Choice, Facts, conclude, propose
from .errors import InsufficientMemoryError, ReleaseError, ReloadpgError
from .group import GroupState, ReloadableProcessGroup
from .operation import Operation, Took
from .plans import Offer
from .strategies import KEEPING, Suspend, abandon, communicators
from .supervised import Attempt

__all__ = ["Suspension"]

logger = logging.getLogger("reloadpg")


class Suspension:
    """What one operation does about groups that keep their communicators.

    Args:
        run: the operation.
    """

    def __init__(self, run: Operation) -> None:
        self.run = run
        self.policy = run.options.strategy

    def proposals(self, groups: Sequence[ReloadableProcessGroup]) -> list[Offer]:
        """What this rank wants to do with each group; what of it other members must hear. Local."""
        offers: list[Offer] = []
        for group in groups:
            name, history = group.group_name, group.history
            wanted = self.policy.wanted(name, group.group_desc)
            facts = self._facts(group, wanted)
            history.held_bytes, history.suspended_bytes = facts.total, facts.suspendable
            choice = self.run.choices[name] = propose(self.policy, wanted, facts)
            if wanted != "recreate" and choice.strategy != "suspend":
                offers.append(choice.to_offer(name))
        return offers

    def questions(self) -> list[str]:
        """The groups of which this rank must hear what other members propose. Local."""
        return [name for name, mine in self.run.choices.items() if mine.strategy != "recreate"]

    def _facts(self, group: ReloadableProcessGroup, wanted: str) -> Facts:
        stats = group.memory_stats()
        total = None if stats is None else stats.get("total", 0)
        if wanted == "recreate":
            return Facts(total=total)
        found = communicators(group.communicator, group.construction)
        obstacles = [c10d.suspend_obstacle(one) for one in found] or ["it has no backend object"]
        if wanted == "auto":
            obstacles.append(self.run.job.suspend_obstacle)
        return Facts(
            next((text for text in obstacles if text), ""),
            used=stats != {},
            total=total,
            suspendable=stats.get("suspend", 0) if stats else 0,
        )

    def conclude(self, groups: Sequence[ReloadableProcessGroup], heard: Mapping[str, str]) -> None:
        """Decide, alike on all members, how each group is released. Local.

        Args:
            groups: those to release.
            heard: what other members propose, by group name.

        Raises:
            ReleaseError: a group cannot be suspended and must not be recreated instead.
        """
        recreated: list[str] = []
        for group in groups:
            name = group.group_name
            theirs = Choice.from_offer(heard[name]) if name in heard else None
            choice = self.run.choices[name] = conclude(self.run.choices[name], theirs)
            group.history.strategy = choice.strategy
            if choice.strategy != "recreate" or not choice.reason:
                continue
            wanted = self.policy.wanted(name, group.group_desc)
            if wanted == "suspend" and not self.policy.fallback:
                raise ReleaseError(
                    f"{self.run.operation}: {group!r} cannot be suspended: {choice.reason}. "
                    "Nothing was changed. Install with strategy='auto', or with a StrategyPolicy "
                    "that allows the fallback to recreate."
                )
            recreated.append(choice.reason)
        for reason in dict.fromkeys(recreated):
            count = recreated.count(reason)
            self.run.warnings.append(f"{count} groups are recreated, not suspended: {reason}")

    def attempt(
        self,
        gate: str,
        groups: Sequence[ReloadableProcessGroup],
        action: Callable[[Suspend], Callable[[ReloadableProcessGroup, Attempt], None]],
    ) -> bool:
        """Suspend or resume groups and pass a gate; if that fails, fall back, on all ranks alike.

        If a communicator fails on any rank, and the policy allows it, all ranks drop all of these
        groups' communicators and go on in a new round without that gate.

        Args:
            gate: the gate after it.
            groups: in the order that all ranks share.
            action: what a strategy does with a group.

        Returns:
            Whether it was done; False after a fall back, on all ranks alike.
        """
        try:
            took = self.run.each(
                gate, groups, lambda g, attempt: action(KEEPING[g.history.strategy])(g, attempt)
            )
            self.run.gate(gate)
        except ReloadpgError as error:
            ended = self.run.round.fail(error)
            verdict = self.run.round.verdict
            mendable = verdict is not None and verdict.mendable and ended == gate
            if not (mendable and self.policy.fallback):
                raise
            self._fall_back(gate, groups, error)
            return False
        self.run.note(took)
        self.run.measure(gate)
        return True

    def _fall_back(
        self, gate: str, groups: Sequence[ReloadableProcessGroup], error: ReloadpgError
    ) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning(
            "%s: %d groups are recreated instead of suspended: %s",
            self.run.operation,
            len(groups),
            reason,
        )
        self.run.warnings.append(f"recreated instead of suspended: {reason}")
        # It has cost all ranks a wait: ``auto`` does not try again in this job.
        self.run.job.suspend_obstacle = f"{gate} failed before: {reason}"
        left = self.run.go_on_after(gate)
        for group in groups:
            self.run.choices[group.group_name] = Choice("recreate", reason)
            group.history.strategy = "recreate"
        begun = time.perf_counter()
        self.run.round.run(
            left[0],
            lambda _: abandon(groups, GroupState.OFFLOADED),
            lambda: "aborting the communicators that could not be suspended or resumed",
        )
        if self.run.operation == "offload":
            each_ms = (time.perf_counter() - begun) * 1e3 / max(1, len(groups))
            self.run.note([Took(group, begun, each_ms) for group in groups])

    def check_room(self, parked: Sequence[ReloadableProcessGroup]) -> None:
        """Find out whether this rank has room for what its suspended communicators gave back.

        Raises:
            InsufficientMemoryError: it has not; nothing was touched.
        """
        suspended = [group for group in parked if group.history.strategy == "suspend"]
        needed = sum(group.history.suspended_bytes for group in suspended)
        known = memory.free_bytes()
        if known is None or known[0] >= needed:
            return
        free, source = known
        raise InsufficientMemoryError(
            f"{self.run.operation}: rank {self.run.world.rank()} has {free / 2**20:.0f} MiB "
            f"free ({source}) and needs {needed / 2**20:.0f} MiB to resume {len(suspended)} "
            "suspended groups. No communicator was resumed on any rank; they stay offloaded. Free "
            "memory there, then call reload() again on all ranks."
        )

    def judge(self) -> None:
        """After an offload: learn from the device whether suspending was worth it. Local.

        A communicator's own account counts only part of its memory. A job whose device got back
        less than ``min_share`` of it recreates its ``auto`` groups from then on: this rank
        proposes so next time, and one proposal is enough.
        """
        source = next(iter(self.run.memory["before"]), "")
        kept = [group for group in self.run.done if group.strategy == "suspend"]
        account = sum(group.bytes or 0 for group in kept)
        stays = account - sum(
            group.history.suspended_bytes
            for group in self.run.groups
            if group.group_name in {one.name for one in kept}
        )
        if kept and stays > 0:
            self.run.warnings.append(
                f"{stays / 2**20:.1f} MiB stay in {len(kept)} suspended communicators, by their "
                "own account; strategy 'recreate' gives them back"
            )
        if not account or source not in memory.exact_sources():
            return
        back = self.run.memory["device"][source] - self.run.memory["released"][source]
        back -= sum(group.bytes or 0 for group in self.run.done if group.strategy == "recreate")
        if back < self.policy.min_share * account:
            text = (
                f"the last suspend gave back {max(0, back) / account:.0%} of {account / 2**20:.0f} "
                f"MiB, measured by {source}"
            )
            self.run.job.suspend_obstacle = text
            self.run.warnings.append(
                f"{text}: NVLS and NET buffers stay, and peers may hold what they have mapped"
            )
