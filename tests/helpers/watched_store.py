"""A store that reports its requests: a subclass of torch's, as a user may write one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Watch = Callable[[str, str], object]


class WatchedStore(dist.Store):
    """Forwards to another store, with a callback for each request. Clones have the same callbacks.

    Args:
        store: the store that responds.
        watch: called before a request with the name of the method and the key.
        answered: called with the same arguments after the response, before the caller gets it.
    """

    def __init__(
        self,
        store: Any,
        watch: Watch = lambda method, key: None,
        answered: Watch = lambda method, key: None,
    ) -> None:
        super().__init__()
        self._store, self._watch, self._answered = store, watch, answered
        self._clones: list[WatchedStore] = []  # a clone of a PrefixStore does not keep them alive

    def clone(self) -> WatchedStore:
        self._clones.append(WatchedStore(self._store.clone(), self._watch, self._answered))
        return self._clones[-1]

    def _ask(self, method: str, key: str, *args: Any) -> Any:
        self._watch(method, key)
        answer = getattr(self._store, method)(key, *args)
        self._answered(method, key)
        return answer

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask("compare_set", key, expected, desired)  # type: ignore[no-any-return]

    def deleteKey(self, key: str) -> bool:  # the name that torch looks for
        return self._ask("delete_key", key)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        self._watch("check", keys[0])
        return self._store.check(keys)  # type: ignore[no-any-return]

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._watch("wait", keys[0])
        self._store.wait(keys, *timeout)

    def getNumKeys(self) -> int:
        return self._store.num_keys()  # type: ignore[no-any-return]
