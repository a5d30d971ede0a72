"""The constants of the hash, and its key table: pure Python, the one source for every implementation.

The hash of some bytes is two 64-bit sums over blocks of 16 KiB, the last one padded with zeros. Of each block, NH (of UMAC) is
taken twice with shifted keys, mixed with the block's position, and added up. Two different inputs have the same sums with a
probability of about 2^-64. It is made against faults, not against somebody who knows the keys and wants a collision.
"""

from __future__ import annotations

BLOCK_BYTES = 16384
WORDS = BLOCK_BYTES // 4
SHIFT = 4
"""By how many words the keys of the second sum are shifted."""
SEED = 0x5EA7_2141_0F1E_ECE5
GAMMA = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""What a block's position is multiplied with, for each sum."""
MASK = (1 << 64) - 1

Sums = tuple[int, int]


def table() -> tuple[int, ...]:
    """The keys, of 32 bits each: the high halves of splitmix64."""
    state, keys = SEED, []
    for _ in range(WORDS + SHIFT):
        state = (state + GAMMA[0]) & MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        keys.append((mixed ^ (mixed >> 31)) >> 32)
    return tuple(keys)


TABLE = table()


def signed(value: int) -> int:
    """The same 64 bits as a signed number: torch has no unsigned arithmetic."""
    return value - (1 << 64) if value >> 63 else value
