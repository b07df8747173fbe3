"""Bindings of ``new_group`` that are not in a module dictionary."""

import functools

import torch.distributed as dist

partial = functools.partial(dist.new_group, group_desc="by partial")


class Holder:
    new_group = staticmethod(dist.new_group)


def by_default(ranks, new_group=dist.new_group):
    return new_group(ranks, group_desc="by default")
