"""Communicators that a rollout engine in this process keeps outside of process groups.

vLLM and SGLang give each of their groups a separate communicator object; on CUDA it holds NCCL
communicators and buffers that torch does not know. An offload leaves these as they are.
"""

from __future__ import annotations

import sys
from typing import Any

_MODULES = {"vllm": "vLLM", "sglang.srt": "SGLang"}
"""Packages whose ``distributed.parallel_state`` lists its groups in ``_groups``, by unique name.

Weak references to ``GroupCoordinator``, seen in vLLM 0.32 and read in SGLang's source. Its
communicators are attributes that end in ``_comm``: in vLLM of ``device_communicator``, in SGLang of
the group.
"""

_FREED = {
    ("vLLM", "pynccl_comm"): "reloadpg.integrations.vllm.device_communicators(), or "
    "LLM(enable_nccl_comm_suspend=True) and its sleep(), with NCCL 2.29.7 or later",
    ("vLLM", "ca_comm"): "LLM(disable_custom_all_reduce=True) leaves it out",
    ("SGLang", "ca_comm"): "Engine(disable_custom_all_reduce=True) leaves it out",
}


def engine_communicators() -> dict[str, str]:
    """Return them by name, each with what frees its memory. Local; imports nothing."""
    remedies = {}
    for package, engine in _MODULES.items():
        state = sys.modules.get(f"{package}.distributed.parallel_state")
        for name, reference in list(getattr(state, "_groups", {}).items()):
            group = reference()
            for owner in (group, getattr(group, "device_communicator", None)):
                for attribute, communicator in list(getattr(owner, "__dict__", {}).items()):
                    if attribute.endswith("_comm") and _holds_memory(communicator):
                        free = _FREED.get((engine, attribute), "end the engine")
                        what = f"{type(communicator).__name__} of {engine}'s group {name}"
                        remedies[f"{name}.{attribute}"] = f"{what}; to free its memory: {free}"
    return remedies


def _holds_memory(communicator: Any) -> bool:
    off = ("disabled", "_suspended")
    return communicator is not None and not any(getattr(communicator, flag, False) for flag in off)
