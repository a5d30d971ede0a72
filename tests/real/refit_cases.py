"""What arrives, with every transport, dtype and coding, and what is refused before anything is written.

Runs inside a loop's environment (see inside.py).
"""

from __future__ import annotations

from pathlib import Path

import torch

from seatrial.instruments.refit.weight_transfer import Consumer
from tests.real.refit_world import KINDS, World, broken, flat, raised, recovers, refused


def case_every_transport_is_bit_equal(tmp: Path) -> None:
    for codec in ("none", "zlib", "zstd"):
        world = World(codec=codec, bucket=10_000)
        for index in range(8):
            for transport, kind in KINDS:
                world.train((0.002, 0.01, 0.05, 0.3, 0.5, 1.0, 0.0, 0.01)[index])
                path = tmp / "weights" if index % 2 else None
                prepared, applied = world.refit(transport, kind, path)
                assert world.sent.codec == codec
                assert (prepared.transport, prepared.kind) == (transport, kind or "overwrite")
                assert applied.changed == prepared.changed
                assert applied.bytes == prepared.bytes > 0
        assert world.consumer.version == world.producer.version == 32


def case_coding_follows_the_density() -> None:
    seen = {}
    for share in (0.0, 0.01, 0.5, 1.0):
        world = World({"w": torch.randn(100_000).bfloat16()})
        world.refit("full")
        world.train(share)
        prepared, _ = world.refit("sparse")
        (seen[share],) = prepared.modes
        assert prepared.bytes < 201_500
        assert abs(prepared.changed / prepared.elements - share) < 0.01
    assert list(seen.values()) == ["same", "sparse", "bitmap", "dense"]


def case_wire_takes_few_bits_per_change() -> None:
    """Changes as training makes them: 75 % by one unit in the last place, 11 % by two, the others by 3 to 152."""
    torch.manual_seed(4)
    for share, bits in ((0.01, 12.5), (0.1, 9.0)):
        world = World({"w": (torch.randn(4_000_000) * 0.02).bfloat16()}, codec="zstd")
        world.refit("full")
        units = world.policy["w"].view(torch.int16)
        places = (torch.rand(units.numel()) < share).nonzero().view(-1)
        draw, sign = torch.rand(len(places)), torch.randint(0, 2, (len(places),)) * 2 - 1
        units[places] += (torch.where(draw < 0.75, 1, torch.where(draw < 0.86, 2, torch.randint(3, 153, draw.shape))) * sign).to(
            torch.int16
        )
        prepared, _ = world.refit("sparse", "difference")
        assert (prepared.modes, world.sent.codec, prepared.changed) == ({"sparse": 1}, "zstd", len(places))
        assert prepared.bytes * 8 / prepared.changed <= bits, (share, prepared.bytes * 8 / prepared.changed)


def case_changed_counts_elements_of_every_dtype() -> None:
    for dtype in (torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
        world = World({"w": torch.ones(1000).to(dtype)})
        world.refit("full")
        size = world.policy["w"].element_size()
        for element in (3, 500, 999):
            flat(world.policy["w"])[element * size : (element + 1) * size] ^= 255
        for transport in ("sparse", "full"):
            prepared, applied = world.refit(transport)
            assert prepared.changed == applied.changed == (3 if transport == "sparse" else 0), dtype


def case_names_and_layouts() -> None:
    world = World()
    data = world.producer.prepare(world.policy, "full")
    other = dict(world.live)
    moved = other.pop("half")
    assert broken(world, "unknown-name", data, Consumer(other)).names == ("half",)
    assert broken(world, "absent-name", data, Consumer(world.live | {"extra": moved.clone()})).names == ("extra",)
    assert broken(world, "layout", data, Consumer(world.live | {"half": moved.view(5, 100)})).names == ("half",)
    assert broken(world, "layout", data, Consumer(world.live | {"half": moved.bfloat16()})).names == ("half",)
    turned = world.live["single"].clone().T.contiguous().T
    assert broken(world, "layout", data, Consumer(world.live | {"single": turned})).names == ("single",)
    world.producer.rollback()
    assert refused("layout", world.producer.prepare, world.policy | {"half": moved.float()}, "full").names == ("half",)
    assert refused("absent-name", world.producer.prepare, {}, "full").names[0] == "counts"
    assert refused("unknown-name", world.producer.prepare, world.policy | {"extra": moved}, "full").names == ("extra",)
    recovers(world, world.producer.root)


def case_export_need_not_be_contiguous() -> None:
    world = World()
    world.policy["single"] = world.policy["single"].T.contiguous().T
    assert not world.policy["single"].is_contiguous()
    data = world.producer.prepare({name: value + 1 if name == "single" else value for name, value in world.policy.items()}, "full")
    world.consumer.apply(data)
    assert torch.equal(world.live["single"], world.policy["single"] + 1)


def case_tied_names_are_written_once() -> None:
    tied = torch.randn(50, 4).bfloat16()
    world = World({"embed.weight": tied, "norm.weight": torch.randn(4), "lm_head.weight": tied})
    world.live["lm_head.weight"] = world.live["embed.weight"]
    world.consumer = Consumer(world.live)
    world.refit("full")
    for transport, kind in KINDS:
        tied.view(torch.int16).view(-1)[:40] += 3
        world.refit(transport, kind)
    root = world.producer.root
    data = world.producer.prepare(world.policy | {"lm_head.weight": tied + 1}, "sparse")
    assert broken(world, "layout", data).names == ("embed.weight", "lm_head.weight")
    recovers(world, root)


def case_partly_shared_memory_is_refused() -> None:
    whole = torch.zeros(100)
    world = World({"a": torch.zeros(60), "b": torch.zeros(60)})
    world.consumer = Consumer({"a": whole[:60], "b": whole[40:]})
    assert refused("layout", world.consumer.apply, world.producer.prepare(world.policy, "full")).names == ("a", "b")


def case_one_payload_at_a_time() -> None:
    world = World()
    world.producer.prepare(world.policy, "full")
    assert "version 1 is pending" in str(raised(RuntimeError, world.producer.prepare, world.policy, "full"))
    world.producer.rollback()
    assert "no payload is pending" in str(raised(RuntimeError, world.producer.rollback))
    assert "no payload is pending" in str(raised(RuntimeError, world.producer.commit, world.producer.root, 1))
    recovers(world, world.producer.root)


def case_nan_arrives_bit_for_bit_and_is_reported() -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        bits = world.policy["model.layers.1.weight"].view(-1).view(torch.int16)
        bits[7], bits[8], bits[9], bits[10] = 0x7FC1, -0x0005, 0x7F80, -0x8000  # two NaNs with payloads, +Inf, -0.0
        world.policy["single"].view(-1).view(torch.int32)[4] = 0x7FA0_0001  # signalling
        world.policy["eighth"].view(torch.uint8)[2] = 0x7F
        prepared, _ = world.refit(transport, kind)
        assert prepared.nonfinite == {"model.layers.1.weight": 3, "single": 1, "eighth": 1}
        assert world.live["model.layers.1.weight"].view(-1).view(torch.int16)[7] == 0x7FC1
        world.train()
        prepared, _ = world.refit("sparse")
        assert prepared.nonfinite["model.layers.1.weight"] == 3
        root = world.producer.root
        world.producer.prepare(world.policy, "sparse")
        recovers(world, root)


def case_large_finite_values_are_not_reported() -> None:
    world = World({"w": torch.full((10_000,), 60000.0).half(), "v": torch.full((100,), 3e38)})
    assert world.refit("full")[0].nonfinite == {}


def case_training_on_does_not_tear_a_payload() -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        world.train()
        sent = {name: flat(tensor).clone() for name, tensor in world.policy.items()}
        data = world.producer.prepare(world.policy, transport, kind)
        world.train(0.5)
        applied = world.consumer.apply(data)
        assert all(torch.equal(sent[name], flat(world.live[name])) for name in sent)
        world.producer.commit(applied.root, applied.version)
        world.refit("sparse", "difference")


def case_kind_follows_what_is_known_of_the_generator() -> None:
    world = World()
    world.train()
    prepared, _ = world.refit("sparse")
    assert (prepared.transport, prepared.kind) == ("sparse", "overwrite"), "the generator has not said what it holds"
    world.train()
    assert world.refit("sparse")[0].kind == "difference"
    world.producer.prepare(world.policy, "sparse")
    world.producer.rollback()
    prepared, _ = world.refit("sparse", "overwrite")
    assert (prepared.transport, prepared.kind) == ("sparse", "overwrite"), "told otherwise"


def case_additive_peer_drifts_and_ours_does_not() -> None:
    """The same twenty steps: fp32 master, bf16 export; the peer adds bf16 differences, as earlier systems did."""
    torch.manual_seed(3)
    master = torch.randn(400_000) * 0.02
    master = master.bfloat16().float()
    lasting = torch.randn_like(master)
    world = World({"w": master.bfloat16()})
    peer, sent = world.policy["w"].clone(), world.policy["w"].clone()
    for _ in range(20):
        master += 3e-6 * 0.3 * (0.5 * lasting + 0.5 * torch.randn_like(master))
        export = master.bfloat16()
        world.policy["w"].copy_(export)
        peer += export - sent
        sent.copy_(export)
        prepared, _ = world.refit("sparse")
        assert prepared.modes == {"sparse": 1}
    drift = int((peer.view(torch.int16) != world.policy["w"].view(torch.int16)).sum())
    assert drift > 0, "the data would not have shown it"
