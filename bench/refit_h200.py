"""Fingerprint, delta encoding and decoding of 8.03e9 bf16 parameters on one GPU: ours beside the peers, in one run.

    PYTHONPATH=src python3 bench/refit_h200.py [--share 1.0] [--json FILE]

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
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.bits import delta, gpu, plain
from seatrial.instruments.bits import fingerprint as hashing

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
        size = torch.where(
            chance < 0.75 * share, 1, torch.where(chance < 0.86 * share, 2, ((chance / share - 0.86) / 0.14 * 150 + 3).to(torch.int16))
        )
        sign = torch.where(torch.rand(part.numel(), device=base.device, generator=draw) < 0.5, -1, 1)
        part += torch.where(
            chance < share, (size * sign).to(torch.int16).clamp(-152, 152), torch.zeros((), dtype=torch.int16, device=base.device)
        )
    return made


def check() -> int:
    """Ours against plain torch: sums, planes, decoding, roll back. Returns how many cases were compared."""
    cases = 0
    dtypes = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.int64,
        torch.uint8,
    )
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
        plan = gpu.KernelPlan([now for now, _ in pairs], [old for _, old in pairs])
        made = plan.encode(kind == "overwrite")
        for (_, base), planes, count, sums, (now, _, (*expected, changed)) in zip(
            pairs, plan.planes(made), made.changed, made.sums, wanted, strict=True
        ):
            what = (tuple(now.shape), kind, changed)
            assert count == changed, (what, count)
            assert all(torch.equal(own.cpu(), plane) for own, plane in zip(planes, expected, strict=True)), what
            assert same(base, now), what
            assert sums == plain.add_sums(plain.flat(now), 0, (0, 0)), what
            cases += 1
        for sparse in (made, plan.joined(plan.planes(made))):
            targets = [old.cuda() for _, old, _ in wanted]
            there = gpu.KernelPlan(targets)
            there.apply(sparse, "add" if kind == "difference" else "overwrite")
            assert all(same(target, now) for target, (now, _, _) in zip(targets, wanted, strict=True))
            if kind == "difference":
                there.apply(sparse, "subtract")
                assert all(same(target, old) for target, (_, old, _) in zip(targets, wanted, strict=True))
        torn = gpu.Delta(made.counts, made.offsets[:-1], made.values[:-1], [*made.ends[:-1], made.ends[-1] - 1])
        before = [target.clone() for target in targets]
        try:
            there.apply(torn, "overwrite")
            raise AssertionError("torn planes were taken")
        except ValueError:
            cases += 1
        assert all(same(target, old.cpu()) for target, old in zip(targets, before, strict=True))
        cases += fronts(wanted, kind)
    return cases


def same(left: Any, right: Any) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(left.cpu().view(torch.uint8), right.view(torch.uint8))


def fronts(wanted: Sequence[Any], kind: str) -> int:
    """The functions that users call, on CUDA tensors against CPU tensors: every mode, there and back."""
    for now, old, _ in wanted:
        results = []
        for device in ("cpu", "cuda"):
            base, target = old.clone().to(device), old.clone().to(device)
            coded, sums = delta.encode(now.to(device), base, kind)
            delta.apply(target, coded, kind)
            assert same(target, now), (tuple(now.shape), kind, coded.mode)
            if kind == "difference":
                delta.revert(target, coded)
                assert same(target, old), (tuple(now.shape), kind, coded.mode)
            results.append((coded.mode, coded.changed, sums))
        assert results[0] == results[1], (tuple(now.shape), results)
    return len(wanted)


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


class Run:
    """The buffers and the figures."""

    def __init__(self, share: float) -> None:
        self.shapes = llama(share)
        self.sizes = [torch.Size(shape).numel() for shape in self.shapes]
        self.flat = torch.empty(sum(self.sizes), dtype=torch.bfloat16, device="cuda")
        for start in range(0, self.flat.numel(), GROUP):
            self.flat[start : start + GROUP].normal_(0, 0.02)
        self.other = torch.empty_like(self.flat)
        self.rows: list[dict[str, Any]] = []
        print(f"{self.flat.numel():,} parameters in {len(self.shapes)} tensors")

    def cut(self, whole: Any) -> list[Any]:
        """The tensors of a flat buffer."""
        return [part.view(shape) for part, shape in zip(whole.split(self.sizes), self.shapes, strict=True)]

    def row(self, what: str, spent: tuple[float, float, float], note: str = "") -> None:
        """Print and keep one figure."""
        self.rows.append({"what": what, "ms": spent[0], "least": spent[1], "largest": spent[2], "note": note})
        print(f"  {what:62} {spent[0]:8.2f} ms   ({spent[1]:.2f} to {spent[2]:.2f}) {note}", flush=True)

    def fingerprint(self) -> None:
        """Of the whole model."""
        spent = timed(lambda: self.other.copy_(self.flat))
        self.row("device copy (read + write)", spent, f"{self.flat.numel() * 4 / spent[0] / 1e9:.2f} TB/s")
        print("fingerprint of the whole model")
        tensors = self.cut(self.flat)
        plan = gpu.KernelPlan(tensors)
        assert plan.sums() == hashing.sums(tensors)
        self.row("ours: plan made once, sums on the host", timed(plan.sums), "order-sensitive")
        self.row("ours: hashing.sums(tensors)", timed(lambda: hashing.sums(tensors)), "order-sensitive")
        self.row("peer: torch.hash_tensor", timed(lambda: chunked(self.flat, torch.hash_tensor)), "order-blind")
        byte_sum = timed(lambda: chunked(self.flat, lambda part: part.view(torch.uint8).sum(dtype=torch.int64)), repeats=3)
        self.row("peer: byte sums", byte_sum, "order-blind")

    def delta(self, share: float, more: bool) -> None:
        """Encode and decode with this share of units changed."""
        print(f"{share:.1%} changed")
        self.other.copy_(self.flat)
        current = perturbed(self.flat, share, 7)
        nows, olds = self.cut(current), self.cut(self.other)
        plan, target = gpu.KernelPlan(nows, olds), gpu.KernelPlan(olds)
        made = plan.encode(overwrite=False)
        assert torch.equal(self.other.view(torch.int16), current.view(torch.int16))
        found, entries = sum(made.changed), made.ends[-1]
        bits = (entries * 24 + made.counts.numel() * 8) / max(1, found)
        back = lambda: target.apply(made, "subtract")  # noqa: E731
        note = f"{found / current.numel():.3%} of units, {bits:.1f} bits per change raw"
        self.row("ours: encode + baseline update + fingerprint", timed(lambda: plan.encode(overwrite=False), back), note)
        pairs = list(zip(nows, olds, strict=True))
        self.row("ours: the same by delta.encode_many(pairs)", timed(lambda: delta.encode_many(pairs), back))
        self.row("ours: decode in place", timed(lambda: target.apply(made, "add"), back))
        assert torch.equal(self.other.view(torch.int16), current.view(torch.int16))
        back()
        assert torch.equal(self.other.view(torch.int16), self.flat.view(torch.int16))
        for name, work in peers(current, self.flat).items():
            self.row(f"peer: {name}", timed(work, repeats=3))
        self.row("peer: decode, index_copy into full scratch", timed(lambda: index_copy(made, self.sizes), repeats=3))
        if more:
            overwrite = gpu.Delta(made.counts, made.offsets, made.values, made.ends)
            self.row("  the same entries as overwrite: decode", timed(lambda: target.apply(overwrite, "overwrite")))


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the model's layers")
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"checked: {check()} cases equal plain torch bit for bit ({time.monotonic() - began:.1f} s)")
    run = Run(arguments.share)
    run.fingerprint()
    for share in (0.001, 0.01, 0.1):
        run.delta(share, share == 0.01)
        torch.cuda.empty_cache()
    if arguments.json:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": run.rows}
        Path(arguments.json).write_text(json.dumps(record, indent=1), encoding="utf-8")


def index_copy(made: Any, sizes: Sequence[int]) -> None:
    """A scratch of the largest tensor, zeroed, and one index_copy per tensor."""
    scratch = torch.empty(max(sizes), dtype=torch.int16, device="cuda")
    start = 0
    for end, size in zip(made.ends, sizes, strict=True):
        part = scratch[:size].zero_()
        # positions as the peers send them; here any ascending ones of the same number
        places = torch.arange(end - start, device="cuda", dtype=torch.int64) * max(1, size // max(1, end - start))
        part.index_copy_(0, places.clamp_(max=size - 1), made.values[start:end])
        start = end


if __name__ == "__main__":
    main()
