"""NCCL's context, and DeepEP V2's buffer (Megatron-LM#5153)."""

from __future__ import annotations

from typing import Any

from deep_ep import ElasticBuffer
from transformer_engine.pytorch import ep as te_ep

_elastic_buffer: Any = None


def get_elastic_buffer(group: Any) -> Any:
    global _elastic_buffer
    if _elastic_buffer is None or _elastic_buffer.group != group:
        _elastic_buffer = ElasticBuffer(group, explicitly_destroy=True)
    return _elastic_buffer


def ensure_nccl_ep_bootstrapped(group: Any) -> None:
    if not te_ep._BOOTSTRAPPED:
        te_ep.ep_bootstrap(group)


def nccl_ep_finalize() -> None:
    te_ep.ep_finalize()
