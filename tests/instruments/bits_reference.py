"""The specification of the hash and of the delta coding, written down once more: slow, in pure Python, from the text alone."""

from __future__ import annotations

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
BLOCK, ROW = 16384, 512
GAMMA = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def keys() -> list[int]:
    """High 32 bits of the outputs of splitmix64."""
    state, made = 0x5EA721410F1EECE5, []
    for _ in range(4100):
        state = (state + 0x9E3779B97F4A7C15) & M64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        made.append((z ^ (z >> 31)) >> 32)
    return made


KEYS = keys()


def fmix64(x: int) -> int:
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & M64
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & M64
    return x ^ (x >> 33)


def sums(data: bytes) -> tuple[int, int]:
    found = [0, 0]
    for block in range(-(-len(data) // BLOCK)):
        padded = data[block * BLOCK : (block + 1) * BLOCK].ljust(BLOCK, b"\0")
        w = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, BLOCK, 4)]
        for j in (0, 1):
            a = sum(((w[i] + KEYS[i + 4 * j]) & M32) * ((w[i + 1] + KEYS[i + 1 + 4 * j]) & M32) for i in range(0, 4096, 2))
            found[j] = (found[j] + fmix64((a + (block + 1) * GAMMA[j]) & M64)) & M64
    return found[0], found[1]


def units(data: bytes) -> list[int]:
    padded = data + b"\0" * (len(data) % 2)
    return [int.from_bytes(padded[i : i + 2], "little") for i in range(0, len(padded), 2)]


def planes(current: bytes, base: bytes, overwrite: bool = False) -> tuple[list[int], list[int], list[int], int]:
    """Counts, offsets and values of the rows, and how many units changed."""
    now, old = units(current), units(base)
    counts, offsets, values, changed = [], [], [], 0
    for row in range(0, len(now), 256):
        chosen = [i for i in range(row, min(row + 256, len(now))) if now[i] != old[i]]
        changed += len(chosen)
        counts.append(min(len(chosen), 255))
        if len(chosen) >= 255:
            chosen = list(range(row, min(row + 256, len(now))))
        for i in chosen:
            difference = (now[i] - old[i]) & 0xFFFF
            signed = difference - 65536 if difference >= 32768 else difference
            offsets.append(i - row)
            values.append(now[i] if overwrite else (2 * signed if signed >= 0 else -2 * signed - 1))
    return counts, offsets, values, changed


def gaps(counts: list[int], offsets: list[int], nbytes: int) -> list[int]:
    """The units between entries: 255 for each 255 of them, then the rest."""
    made: list[int] = []
    left, last = list(offsets), -1
    for row, count in enumerate(counts):
        size = min(256, -(-nbytes // 2) - row * 256) if count == 255 else count
        for offset in left[:size]:
            between = row * 256 + offset - last - 1
            made += [255] * (between // 255) + [between % 255]
            last = row * 256 + offset
        left = left[size:]
    return made
