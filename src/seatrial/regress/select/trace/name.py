"""The one name that instrumented code knows, and the version of what instrumenting does (part of the key of cached code)."""

from __future__ import annotations

NAME = "__seatrial_hit__"
VERSION = 5
