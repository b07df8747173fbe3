"""Tests of somebody else's project, run by ``test_plugin.py``: where the mark cannot be used."""

from __future__ import annotations

import unittest

import pytest


class Case(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self):
        raise RuntimeError("never run")
