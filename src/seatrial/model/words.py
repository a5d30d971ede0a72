"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
