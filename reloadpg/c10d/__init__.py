"""Every touch of torch's private names, and every branch on torch's version.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. Other modules ask this package and never import a name
with a leading underscore from torch themselves. What torch really does here was learnt by running
it; each function says what it relies on.
"""

from __future__ import annotations

from .backends import (
    abort_all,
    add_backends,
    get_timeouts,
    group_of_backends,
    live_backends,
    memory_stats,
    options_of,
    set_timeouts,
    suspend_obstacle,
    together,
)
from .creation import (
    batch_coalesced,
    batching_refuses_subclasses,
    check_batch,
    create_world,
    creator_modules,
    forced_name,
    init_process_group_original,
    observed_names,
)
from .inspection import is_coalescing, register_debug_handler, registered, table_sizes
from .stores import (
    clone_store,
    rendezvous_keys,
    replace_store,
    root_store,
    store_path,
)
from .tables import (
    backend_of,
    barrier_after_creation,
    close_coalescing,
    default_timeout,
    device_backends,
    drop_generation,
    evict,
    has_peers,
    is_initialized,
    is_known,
    is_non_member,
    known_backends,
    known_groups,
    name_of,
    ranks_of,
    store_of,
    take_generation,
    take_place,
    world,
)

__all__ = [
    "abort_all",
    "add_backends",
    "backend_of",
    "barrier_after_creation",
    "batch_coalesced",
    "batching_refuses_subclasses",
    "check_batch",
    "clone_store",
    "close_coalescing",
    "create_world",
    "creator_modules",
    "default_timeout",
    "device_backends",
    "drop_generation",
    "evict",
    "forced_name",
    "get_timeouts",
    "group_of_backends",
    "has_peers",
    "init_process_group_original",
    "is_coalescing",
    "is_initialized",
    "is_known",
    "is_non_member",
    "known_backends",
    "known_groups",
    "live_backends",
    "memory_stats",
    "name_of",
    "observed_names",
    "options_of",
    "ranks_of",
    "register_debug_handler",
    "registered",
    "rendezvous_keys",
    "replace_store",
    "root_store",
    "set_timeouts",
    "store_of",
    "store_path",
    "suspend_obstacle",
    "table_sizes",
    "take_generation",
    "take_place",
    "together",
    "world",
]
