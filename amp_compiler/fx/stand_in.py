"""Modules that stand for others."""

from __future__ import annotations

from typing import Any

from torch import nn


class StandIn(nn.Module):
    """Base of a module that stands for another one, which is in its attribute `original`."""

    original: Any
