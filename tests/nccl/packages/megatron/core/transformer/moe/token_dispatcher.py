"""What 0.19.2 keeps in each layer: whether NCCL's context has been created."""

from __future__ import annotations

from typing import Any

from . import fused_a2a


class _NCCLEPManager:
    _zc_fwd_token_buf: Any = None

    def __init__(self, group: Any) -> None:
        self.group = group
        self._bootstrapped = False

    def dispatch(self) -> int:
        if not self._bootstrapped:
            fused_a2a.ensure_nccl_ep_bootstrapped(self.group)
            if _NCCLEPManager._zc_fwd_token_buf is None:
                _NCCLEPManager._zc_fwd_token_buf = [self.group.generation]
            self._bootstrapped = True
        assert _NCCLEPManager._zc_fwd_token_buf == [self.group.generation]
        return fused_a2a.te_ep.dispatched()
