"""Megatron is not there: importing this hides it from a run that does not use it.

verl imports all its engines and takes a failed import for an engine that is not installed. But Megatron-Core without its shims
fails only half-way, and by then it has replaced how torch unpickles tensors: no other process could read what this one sends.
"""

from __future__ import annotations

from seatrial.instruments.megatron import import_patches

import_patches.hide("megatron.core")
