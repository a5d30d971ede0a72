"""Fingerprint, delta encoding and decoding of 8.03e9 bf16 parameters on one GPU: ours beside the peers, in one run.

    PYTHONPATH=src python3 bench/refit_h200.py [--share 1.0] [--variants]

First the kernels are compared with the plain torch implementation, bit for bit, on many shapes and dtypes; nothing is timed before
that holds. Times are medians over repeats, by CUDA events, after a warm-up. The tensors are those of an 8B Llama (291 of them).
Peers are re-implemented from their public descriptions, with their baseline already on the GPU, which upstream's is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from seatrial.probes.bits import gpu, plain

REPEATS = 7
GROUP = 128 << 20
"""Elements that a peer looks at in one go: 256 MiB."""


def llama(share: float) -> list[tuple[int, ...]]:
    """The shapes of an 8B model; `share` of its layers."""
    hidden, inner, grouped, vocabulary, layers = 4096, 14336, 1024, 128256, max(1, round(32 * share))
    layer: list[tuple[int, ...]] = [(hidden, hidden), (grouped, hidden), (grouped, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    ends: list[tuple[int, ...]] = [(vocabulary, hidden)] * (2 if share == 1 else 0)
    return ends + layer * layers + [(hidden,)]


def timed(work: Callable[[], Any], before: Callable[[], Any] | None = None, repeats: int = REPEATS) -> tuple[float, float, float]:
    """Median, least and largest milliseconds."""
    times = []
    for index in range(repeats + 2):
        if before:
            before()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def reference(current: Any, base: Any, kind: str) -> tuple[Any, Any, Any, int]:
    """Planes by plain torch on the CPU."""
    planes, changed, _ = plain.encode(plain.flat(current), plain.flat(base).clone(), kind == "overwrite")
    return planes.counts, planes.offsets, planes.values, changed


def perturbed(base: Any, share: float, seed: int) -> Any:
    """A copy in which this share of the 16-bit units differs: 75 % by 1, 11 % by 2, the rest by 3 to 152."""
    made = base.clone()
    flat = made.view(-1).view(torch.int16)
    draw = torch.Generator(device=base.device).manual_seed(seed)
    for start in range(0, flat.numel(), GROUP):
        part = flat[start : start + GROUP]
        chance = torch.rand(part.numel(), device=base.device, generator=draw)
        size = torch.where(chance < 0.75 * share, 1, torch.where(chance < 0.86 * share, 2, ((chance / share - 0.86) / 0.14 * 150 + 3).to(torch.int16)))
        sign = torch.where(torch.rand(part.numel(), device=base.device, generator=draw) < 0.5, -1, 1)
        part += torch.where(chance < share, (size * sign).to(torch.int16).clamp(-152, 152), torch.zeros((), dtype=torch.int16, device=base.device))
    return made


def check() -> int:
    """Ours against plain torch: sums, planes, decoding, roll back. Returns how many cases were compared."""
    cases = 0
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.uint8)
    draw = torch.Generator().manual_seed(0)
    tensors = []
    for dtype in dtypes:
        for size in (0, 1, 3, 7, 255, 256, 257, 4095, 8191, 8192, 8193, 100_003):
            width = torch.empty(0, dtype=dtype).element_size()
            tensors.append(torch.randint(0, 256, (size * width,), generator=draw, dtype=torch.uint8).view(dtype))
    tensors.append(torch.randn(64, 96, generator=draw).t())
    tensors.append(torch.randn(1001, generator=draw)[1:])
    tensors.append(torch.tensor(float("nan")))
    expected = [plain.add_sums(plain.flat(tensor), 0, (0, 0)) for tensor in tensors]
    found = gpu.sums([tensor.cuda() if tensor.is_contiguous() else tensor.t().contiguous().cuda().t() for tensor in tensors])
    assert found == expected, [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    cases += len(tensors)
    one = [gpu.sums([tensor.cuda()])[0] for tensor in tensors[:40]]
    assert one == expected[:40]
    for kind in ("difference", "overwrite"):
        pairs, wanted = [], []
        for index, nbytes in enumerate((1, 2, 3, 511, 512, 513, 510, 16383, 16384, 16385, 40_000, 300_001, 4_000_001)):
            for density in (0.0, 0.001, 0.01, 0.1, 0.3, 0.999, 1.0):
                base = torch.randint(0, 256, (nbytes,), generator=draw, dtype=torch.uint8)
                current = torch.where(torch.rand(nbytes, generator=draw) < density, base ^ (1 + index), base)
                pairs.append((current.cuda(), base.cuda()))
                wanted.append((current, base, reference(current, base, kind)))
        hot = torch.zeros(64, 4096, dtype=torch.bfloat16)
        touched = hot.clone()
        touched[7] = 1.0
        touched[9, :255] = 2.0
        pairs.append((touched.cuda(), hot.cuda()))
        wanted.append((touched, hot, reference(touched, hot, kind)))
        made = gpu.encode(pairs, kind)
        for (current, base), planes, (now, old, (counts, offsets, values, changed)) in zip(pairs, made, wanted, strict=True):
            what = (tuple(now.shape), kind, changed)
            assert planes.changed == changed, (what, planes.changed)
            assert torch.equal(planes.counts.cpu(), counts), what
            assert torch.equal(planes.offsets.cpu(), offsets), what
            assert torch.equal(planes.values.cpu(), values), what
            assert torch.equal(base.view(torch.uint8).cpu(), now.view(torch.uint8)), what
            assert planes.sums == plain.add_sums(plain.flat(now), 0, (0, 0)), what
            cases += 1
        targets = [old.cuda() for _, old, _ in wanted]
        sparse = [(planes.counts, planes.offsets, planes.values) for planes in made]
        gpu.apply(targets, sparse, "add" if kind == "difference" else "overwrite")
        assert all(torch.equal(target.cpu().view(torch.uint8), now.view(torch.uint8)) for target, (now, _, _) in zip(targets, wanted, strict=True))
        if kind == "difference":
            gpu.apply(targets, sparse, "subtract")
            assert all(torch.equal(target.cpu().view(torch.uint8), old.view(torch.uint8)) for target, (_, old, _) in zip(targets, wanted, strict=True))
        try:
            gpu.apply(targets[-1:], [(sparse[-1][0], sparse[-1][1][:-1], sparse[-1][2][:-1])], "overwrite")
            raise AssertionError("torn planes were taken")
        except ValueError:
            cases += 1
    return cases


def peers(current: Any, base: Any) -> dict[str, Callable[[], Any]]:
    """What others do, over one flat buffer."""

    def subtract() -> None:
        for start in range(0, current.numel(), GROUP):
            now, old = current[start : start + GROUP], base[start : start + GROUP]
            delta = torch.sub(now, old)
            places = torch.nonzero(delta).view(-1)
            kept = (places.to(torch.int32), delta[places])
            del kept

    def unequal() -> None:
        for start in range(0, current.numel(), GROUP):
            now, old = current[start : start + GROUP].view(torch.int16), base[start : start + GROUP].view(torch.int16)
            places = now.ne(old).nonzero().view(-1)
            kept = (places.to(torch.int32), now[places])
            del kept
        # their baseline is refreshed whole
        scratch.copy_(current)

    scratch = torch.empty_like(current)
    return {"sub / nonzero / gather": subtract, "ne / nonzero / gather / copy": unequal}


def chunked(flat: Any, work: Callable[[Any], Any]) -> None:
    for start in range(0, flat.numel(), GROUP):
        work(flat[start : start + GROUP])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the model's layers")
    parser.add_argument("--variants", action="store_true", help="also time other launch shapes of the kernels")
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"checked: {check()} cases equal plain torch bit for bit ({time.monotonic() - began:.1f} s)")
    shapes = llama(arguments.share)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    for start in range(0, flat.numel(), GROUP):
        flat[start : start + GROUP].normal_(0, 0.02)
    print(f"{flat.numel():,} parameters in {len(shapes)} tensors")
    rows: list[dict[str, Any]] = []

    def row(what: str, spent: tuple[float, float, float], note: str = "") -> None:
        rows.append({"what": what, "ms": spent[0], "least": spent[1], "largest": spent[2], "note": note})
        print(f"  {what:58} {spent[0]:8.2f} ms   ({spent[1]:.2f} to {spent[2]:.2f}) {note}", flush=True)

    def cut(whole: Any) -> list[Any]:
        return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]

    other = torch.empty_like(flat)
    spent = timed(lambda: other.copy_(flat))
    row("device copy (read + write)", spent, f"{flat.numel() * 4 / spent[0] / 1e9:.2f} TB/s")
    print("fingerprint of the whole model")
    tensors = cut(flat)
    row("ours, 291 tensors, digests on the host", timed(lambda: gpu.sums(tensors)), "order-sensitive")
    row("torch.hash_tensor", timed(lambda: chunked(flat, torch.hash_tensor)), "order-blind")
    row("byte sums", timed(lambda: chunked(flat, lambda part: part.view(torch.uint8).sum(dtype=torch.int64)), repeats=3), "order-blind")
    for share in (0.001, 0.01, 0.1):
        print(f"{share:.1%} changed")
        other.copy_(flat)
        current = perturbed(flat, share, 7)
        pairs = list(zip(cut(current), cut(other), strict=True))
        planes = gpu.encode(pairs, "difference")
        assert torch.equal(other.view(torch.int16), current.view(torch.int16))
        sparse = [(item.counts, item.offsets, item.values) for item in planes]
        found = sum(item.changed for item in planes)
        entries = sum(len(item.offsets) for item in planes)
        targets = cut(other)
        note = f"{found / flat.numel():.3%} of units, {(entries * 24 + sum(len(item.counts) for item in planes) * 8) / max(1, found):.1f} bits per change raw"
        row("ours: encode + baseline update + fingerprint", timed(lambda: gpu.encode(pairs, "difference"), lambda: gpu.apply(targets, sparse, "subtract")), note)
        row("ours: decode in place", timed(lambda: gpu.apply(targets, sparse, "add"), lambda: gpu.apply(targets, sparse, "subtract")))
        assert torch.equal(other.view(torch.int16), current.view(torch.int16))
        gpu.apply(targets, sparse, "subtract")
        assert torch.equal(other.view(torch.int16), flat.view(torch.int16))
        for name, work in peers(current, flat).items():
            row(f"peer: {name}", timed(work, repeats=3))
        row("peer: decode, index_copy into full scratch", timed(lambda: index_copy(current, planes, sizes), repeats=3))
        if arguments.variants and share == 0.01:
            variants(pairs, targets, sparse, row)
        del current, pairs, planes, sparse
        torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, out, indent=1)


def index_copy(current: Any, planes: Sequence[Any], sizes: Sequence[int]) -> None:
    """A scratch of the largest tensor, zeroed, and one index_copy per tensor."""
    scratch = torch.empty(max(sizes), dtype=torch.int16, device="cuda")
    for item, size in zip(planes, sizes, strict=True):
        part = scratch[:size].zero_()
        # positions as the peers send them; here any ascending ones of the same number
        places = torch.arange(len(item.offsets), device="cuda", dtype=torch.int64) * max(1, size // max(1, len(item.offsets)))
        part.index_copy_(0, places.clamp_(max=size - 1), item.values)


def variants(pairs: Sequence[tuple[Any, Any]], targets: Sequence[Any], sparse: Sequence[Any], row: Callable[..., None]) -> None:
    """Other unrolling and blocks per multiprocessor."""
    standard = gpu.kernels
    again = lambda: gpu.apply(targets, sparse, "subtract")

    def use(shape, blocks):
        made = gpu.Kernels(0, shape, blocks)
        gpu.kernels = lambda index: made

    for unroll, queue in ((1, 96), (1, 128), (2, 144), (2, 160), (2, 192), (2, 256), (4, 288)):
        for blocks in (2, 3, 4, 8):
            use({"UNROLL": unroll, "QUEUE": queue}, {"encode_tiles": blocks})
            row(f"  encode, unroll {unroll}, queue {queue}, {blocks} blocks", timed(lambda: gpu.encode(pairs, "difference"), again, 3))
    for blocks in (4, 8, 12, 16, 32):
        use({}, {"hash_tiles": blocks})
        row(f"  hash, {blocks} blocks", timed(lambda: gpu.sums([now for now, _ in pairs]), repeats=3))
    for ahead in (1, 2, 4, 8):
        for blocks in (4, 8, 16, 32):
            use({"AHEAD": ahead}, {"apply_tiles": blocks})
            row(f"  decode, ahead {ahead}, {blocks} blocks", timed(lambda: gpu.apply(targets, sparse, "add"), again, 3))
    gpu.kernels = standard


if __name__ == "__main__":
    main()
