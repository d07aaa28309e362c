"""Loads the loops as drawing does, so that no test runs code compiled from earlier sources."""

from __future__ import annotations

from imagegen.generation import decode

decode._fused()
