"""Every use of torch's private names, and every branch on torch's version.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. The other packages use no name of torch with a leading
underscore; a class of theirs that is a process group or a backend defines methods of such names.
:mod:`.needs` lists all names, and a torch without one that the core uses is refused here. This
module lists what the other packages use.
"""

from __future__ import annotations

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

from .needs import describe_needs as describe_needs
from .needs import missing as missing
from .needs import refuse_missing as refuse_missing

refuse_missing("reloadpg")

from .backends import COMPLETION_HOOK as COMPLETION_HOOK
from .backends import NO_ERROR as NO_ERROR
from .backends import CppBackend as CppBackend
from .backends import abort_all as abort_all
from .backends import abort_each as abort_each
from .backends import aborted_groups as aborted_groups
from .backends import add_backends as add_backends
from .backends import await_hooks as await_hooks
from .backends import await_monitors as await_monitors
from .backends import backend_classes as backend_classes
from .backends import backend_for as backend_for
from .backends import completed_work as completed_work
from .backends import connects_eagerly as connects_eagerly
from .backends import connects_in_first_use as connects_in_first_use
from .backends import connects_without_timeout as connects_without_timeout
from .backends import device_types as device_types
from .backends import get_timeouts as get_timeouts
from .backends import gloo_options as gloo_options
from .backends import group_of_backends as group_of_backends
from .backends import is_connected as is_connected
from .backends import live_backends as live_backends
from .backends import memory_stats as memory_stats
from .backends import monitored_backends as monitored_backends
from .backends import options_of as options_of
from .backends import raise_for_aborted as raise_for_aborted
from .backends import sequence_number as sequence_number
from .backends import set_desc as set_desc
from .backends import set_name as set_name
from .backends import set_timeout as set_timeout
from .backends import set_timeouts as set_timeouts
from .backends import timeout_of as timeout_of
from .creation import COMPILERS_NEW_GROUP as COMPILERS_NEW_GROUP
from .creation import CreationByMembers as CreationByMembers
from .creation import batch_coalesced as batch_coalesced
from .creation import batching_refuses_subclasses as batching_refuses_subclasses
from .creation import check_batch as check_batch
from .creation import complete_ranks as complete_ranks
from .creation import create_world as create_world
from .creation import creator_modules as creator_modules
from .creation import creators_outside_tables as creators_outside_tables
from .creation import forget_parent as forget_parent
from .creation import is_creating as is_creating
from .creation import original as original
from .creation import owner_of as owner_of
from .creation import sorts_ranks as sorts_ranks
from .flight_recorder import DUMP_SIGNAL as DUMP_SIGNAL
from .flight_recorder import dump_interval as dump_interval
from .flight_recorder import lacks_dumps as lacks_dumps
from .flight_recorder import write_dump as write_dump
from .inspection import SYMMETRIC_MEMORY as SYMMETRIC_MEMORY
from .inspection import is_coalescing as is_coalescing
from .inspection import on_collective_error as on_collective_error
from .inspection import registered as registered
from .inspection import skip_in_compiled_code as skip_in_compiled_code
from .inspection import symmetric_memory_groups as symmetric_memory_groups
from .inspection import symmetric_memory_keeps_communicators as symmetric_memory_keeps_communicators
from .inspection import table_sizes as table_sizes
from .inspection import unfinished_collectives as unfinished_collectives
from .nccl import LOCKS as LOCKS
from .nccl import Lock as Lock
from .nccl import devices_of as devices_of
from .nccl import group_call as group_call
from .nccl import nccl_is_concerned as nccl_is_concerned
from .nccl import nccl_settings as nccl_settings
from .nccl import nccl_version as nccl_version
from .nccl import needs_one_thread as needs_one_thread
from .nccl import recovery_settings as recovery_settings
from .nccl import release_cautions as release_cautions
from .nccl import resume_backend as resume_backend
from .nccl import shares_lock as shares_lock
from .nccl import suspend_backend as suspend_backend
from .nccl import suspend_obstacle as suspend_obstacle
from .nccl import torchcomms_obstacle as torchcomms_obstacle
from .saves import SAVER as SAVER
from .saves import SAVERS as SAVERS
from .saves import recording_save as recording_save
from .saves import saves_on as saves_on
from .stores import clone_store as clone_store
from .stores import fake_store as fake_store
from .stores import is_store_host as is_store_host
from .stores import rendezvous_keys as rendezvous_keys
from .stores import root_store as root_store
from .stores import root_store_of_job as root_store_of_job
from .stores import shut_store_connections as shut_store_connections
from .stores import unprefixed as unprefixed
from .tables import Unseen as Unseen
from .tables import backend_class as backend_class
from .tables import backend_of as backend_of
from .tables import close_coalescing as close_coalescing
from .tables import default_timeout as default_timeout
from .tables import desc_of as desc_of
from .tables import device_backends as device_backends
from .tables import discard_generation as discard_generation
from .tables import drop_generation as drop_generation
from .tables import entry_of as entry_of
from .tables import has_peers as has_peers
from .tables import is_known as is_known
from .tables import is_non_member as is_non_member
from .tables import known_backends as known_backends
from .tables import known_groups as known_groups
from .tables import labels_of as labels_of
from .tables import name_freed as name_freed
from .tables import name_of as name_of
from .tables import ranks_of as ranks_of
from .tables import store_of as store_of
from .tables import take_generation as take_generation
from .tables import take_place as take_place
from .tables import world as world
