"""Cases of test_refit_map.py; they run in the loop's environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import map_learner, tensor_coverage
from seatrial.instruments.refit.map_learner import NotRestored, Saved
from tests.real import fused
from tests.real.plain import Pairs, Plain, change_a, learned, quantized, raised, runs, unconsumed


def loaded(shape: fused.Shape, kind: type[fused.Rank] = fused.Rank) -> tuple[list[fused.Rank], fused.Weights]:
    weights, ranks = fused.policy(shape), fused.engine(shape, kind)
    for rank in ranks:
        rank.load_weights(weights.items())
    return ranks, weights


def case_every_dtype_maps_and_compares_element_for_element() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ranks, weights = loaded(fused.Shape(dtype=dtype))
        maps = [learned(rank, weights) for rank in ranks]
        assert [each.compare(rank, weights) for each, rank in zip(maps, ranks, strict=True)] == [{}, {}]
        run = runs(maps[1], "model.layers.0.self_attn.qkv_proj.weight")[1]
        assert run == ("model.layers.0.self_attn.k_proj.weight", 512, 512, 512)
        assert torch.equal(maps[0].gather(ranks[0], "model.norm.weight"), weights["model.norm.weight"])
        assert maps[0].gather(ranks[0], "model.layers.0.self_attn.q_proj.weight") is None
        key = "model.layers.2.mlp.experts.3.down_proj.weight"
        weights[key][5, 40] = 3.0  # row 5, column 40: on rank 1
        assert [each.compare(rank, weights) for each, rank in zip(maps, ranks, strict=True)] == [
            {},
            {key: map_learner.Wrong(1, 5 * 48 + 40, 32 * 24)},
        ]


def case_bits_count_not_values() -> None:
    module = Plain(a=torch.tensor([0.0, 1.0, float("nan")]))
    each = learned(module, {"a": module.a})
    export = {"a": torch.tensor([-0.0, 1.0, float("nan")])}
    assert each.compare(module, export) == {"a": map_learner.Wrong(1, 0, 3)}
    export["a"] = module.a.clone()
    export["a"].view(torch.int32)[2] ^= 1  # another NaN
    assert each.compare(module, export) == {"a": map_learner.Wrong(1, 2, 3)}


def case_coverage_of_the_stand_in() -> None:
    ranks, weights = loaded(fused.Shape())
    maps = [learned(rank, weights) for rank in ranks]
    watches = [tensor_coverage.LoaderWatch(rank, each) for rank, each in zip(ranks, maps, strict=True)]
    for step in range(2):
        weights = fused.trained(weights, step)
        for rank, watch in zip(ranks, watches, strict=True):
            rank.load_weights(weights.items())
            watch.look()
    found = [tensor_coverage.classify(rank, each, w.touched, w.moved) for rank, each, w in zip(ranks, maps, watches, strict=True)]
    assert found[1].padding == {name: tensor_coverage.Padding(448, True) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert "model.layers.2.mlp.gate.e_score_correction_bias" in found[0].written
    assert set(found[0].derived) == {f"model.layers.{i}.{n}" for i in range(3) for n in ("ssm.A", "self_attn.rotary.inv_freq")}
    assert found[0].constant == ()
    assert found[0].shared == {}
    assert unconsumed(maps) == {"mtp.fc.weight": 1024}
    assert tensor_coverage.misplaced(maps[0]) == tensor_coverage.misplaced(maps[1]) == {}
    assert tensor_coverage.never_changed(watches[0].history) == [f"model.layers.{i}.self_attn.rotary.inv_freq" for i in range(3)]
    assert maps[0].opaque["model.layers.0.ssm.A_log"] == "it comes back changed, in model.layers.0.ssm.A"
    row = found[0].row("r0", [])
    assert row["fact"] == "coverage"
    assert row["derived"] == found[0].derived
    assert row["recomputed"] == [f"model.layers.{i}.self_attn.rotary.inv_freq" for i in range(3)]


def case_tied_names_are_one_storage() -> None:
    ranks, weights = loaded(fused.Shape(tied=True))
    each = learned(ranks[0], weights)
    found = tensor_coverage.classify(ranks[0], each, {})
    assert found.shared == {"lm_head.weight": "model.embed_tokens.weight"}
    assert each.duplicates == {}
    tied = Plain(embed=torch.ones(6))
    tied.head = tied.embed
    one = torch.ones(6)
    assert learned(tied, {"embed": one, "head": one}).unconsumed == {}
    both = {"embed": one, "head": one.clone()}  # two tensors for one storage: the second wins
    assert learned(tied, both).unconsumed == {"embed": 6}
    aliases = learned(tied, {"embed": one, "head": one})
    assert aliases.compare(tied, {"embed": one, "head": torch.zeros(6)}) == {"head": map_learner.Wrong(6, 0, 6)}


def case_views_into_one_buffer_are_counted_once() -> None:
    flat = torch.arange(24.0)
    module = Plain(flat=flat, left=flat[:12].view(3, 4), right=flat[12:].view(3, 4))
    export = {"left": torch.zeros(3, 4), "right": torch.zeros(3, 4)}
    each = learned(module, export)
    assert each.duplicates == {}
    assert each.unconsumed == {}
    assert tensor_coverage.classify(module, each, {}).shared == {"left": "flat", "right": "flat"}
    copies = Plain(one=torch.zeros(4), two=torch.zeros(4))

    def twice(weights: Pairs) -> None:
        for _, value in weights:
            copies.one.copy_(value)
            copies.two.copy_(value)

    each = learned(copies, {"one": torch.zeros(4)}, twice)
    assert each.duplicates == {"one": 4}
    assert torch.equal(each.gather(copies, "one"), torch.zeros(4))
    copies.one[2] = 1.0  # the first copy is wrong, the second would hide it
    assert "copies at runtime differ in 1 elements" in raised(lambda: each.gather(copies, "one"), map_learner.CannotMap).reason
    assert each.compare(copies, {"one": torch.zeros(4)}) == {"one": map_learner.Wrong(1, 2, 8)}


def case_a_loader_that_raises_leaves_every_bit() -> None:
    module = Plain(a=torch.randn(5), b=torch.randn(5))

    def fails(weights: Pairs) -> None:
        for name, value in weights:
            getattr(module, name).copy_(value)
            if name == "b":
                raise KeyError("no such slot")

    before = fingerprint.model(module)
    error = raised(lambda: map_learner.learn(module, fails, {"a": module.a, "b": module.b, "c": module.a}), map_learner.LoadFailed)
    assert error.loaded == ("a", "b")
    assert "KeyError" in str(error)
    assert "2 of 3 names, the last b" in str(error)
    assert fingerprint.model(module) == before


def case_lazy_loaders_and_kept_references() -> None:
    module = Plain(a=torch.randn(5), b=torch.randn(5))
    export = {"a": torch.zeros(5), "b": torch.zeros(5)}

    def lazy(weights: Pairs) -> Iterator[str]:
        for name, value in weights:
            getattr(module, name).copy_(value)
            yield name

    assert learned(module, export, lazy).unconsumed == {}

    def adopts(weights: Pairs) -> None:
        for name, value in weights:
            getattr(module, name).data = value  # keeps what it was given

    assert learned(module, export, adopts).unconsumed == {}
    kept: list[Iterator[tuple[str, Any]]] = []

    def later(weights: Pairs) -> None:
        kept.append(iter(weights))

    assert learned(module, export, later).unconsumed == {"a": 5, "b": 5}
    assert [list(each) for each in kept] == [[], []]  # what it kept gives nothing: no id reaches restored weights
    waiting: list[tuple[str, Any]] = []

    def one_load_behind(weights: Pairs) -> None:
        for name, value in waiting:
            getattr(module, name).copy_(value)
        waiting[:] = list(weights)

    assert not learned(module, export, one_load_behind).tables  # digits of the pass before: nothing is believed


def case_a_loader_may_replace_and_register() -> None:
    module = Plain(a=torch.randn(4), b=torch.randn(4))

    def replaces(weights: Pairs) -> None:
        for name, value in weights:
            setattr(module, name, nn.Parameter(value.clone(), requires_grad=False))
        module.register_buffer("packed", torch.zeros(3))
        module.b.untyped_storage().resize_(16)

    objects = dict(module.named_parameters())
    assert learned(module, {"a": torch.zeros(4), "b": torch.zeros(4)}, replaces).unconsumed == {}
    assert dict(module.named_parameters()) is not objects
    assert module.a is objects["a"]
    assert not hasattr(module, "packed")


def case_changing_loaders_are_refused_with_the_reason() -> None:
    export = {"a": torch.randn(300), "b": torch.randn(300)}
    changes: dict[str, Callable[[Any], Any]] = {
        "abs": torch.abs, "add one": lambda v: v + 1, "negate": lambda v: -v, "clip": lambda v: v.clamp(-100, 100),
        "exp": torch.exp, "half": lambda v: v / 2, "flip sign of half": lambda v: torch.cat([v[:9], -v[9:]]),
    }  # fmt: skip
    for name, change in changes.items():
        module = Plain(partial(change_a, change), a=torch.randn(300), b=torch.randn(300))
        each = learned(module, export)
        assert "came back changed" in each.opaque["a"], name
        assert set(each.tables) <= {"a", "b"}
        assert each.gather(module, "a") is None
        assert each.compare(module, {"a": export["a"], "b": module.b.clone()}).keys() <= {"a"}, name
    module = Plain(a=torch.zeros(9, dtype=torch.int8), b=torch.zeros(9, dtype=torch.float8_e4m3fn), c=torch.zeros(9))
    each = learned(module, dict(module.named_parameters()))
    assert all("cannot hold the numbers" in each.opaque[name] for name in "ab")
    assert set(each.tables) == {"c"}


def case_fp8_is_refused_by_the_map_and_compared_quantised() -> None:
    ranks, weights = loaded(fused.Shape(fp8=True))
    each, key = learned(ranks[0], weights), "model.layers.0.mlp.down_proj.weight"
    assert "came back changed" in each.opaque[key]
    assert key not in each.tables
    bits, scale = fused.quantise(weights[key].chunk(2, 1)[0])
    expected = {key: bits, f"{key}_scale": scale}
    assert quantized(ranks[0], expected) == {}
    ranks[0].get_parameter(f"{key}_scale").fill_(1.0)
    assert quantized(ranks[0], expected) == {f"{key}_scale": map_learner.Wrong(1, 0, 1)}
    assert quantized(ranks[0], {"gone_scale": scale}) == {"gone_scale": map_learner.Wrong(1, 0, 1)}


def case_casts_are_said_and_compared_after_the_cast() -> None:
    module = Plain(a=torch.zeros(300, dtype=torch.bfloat16))
    export = {"a": torch.randn(300)}
    each = learned(module, export)
    assert each.casts == {"a": "torch.float32 to torch.bfloat16"}
    module.load_weights(export.items())
    assert each.compare(module, export) == {}
    module.a[7] += 1
    assert each.compare(module, export) == {"a": map_learner.Wrong(1, 7, 300)}


def case_meta_empty_and_integers() -> None:
    module = Plain(a=torch.zeros(3, device="meta"))
    error = raised(lambda: map_learner.learn(module, module.load_weights, {"a": module.a}), map_learner.CannotMap)
    assert error.name == "a"
    assert "meta device" in error.reason
    module = Plain(a=torch.zeros(0, 4), b=torch.randn(4), n=torch.zeros(4, dtype=torch.int64))
    module.register_buffer("places", torch.tensor([1, 0, 3, 2]))  # a loader reads it, so it must keep its values

    def through(weights: Pairs) -> None:
        for name, value in weights:
            getattr(module, name).copy_(value[module.places] if value.numel() else value)

    export = {"a": torch.zeros(0, 4), "b": torch.empty(4, device="meta"), "n": torch.zeros(4, dtype=torch.int64)}
    each = learned(module, export, through)
    assert [start for _, start, *_ in runs(each, "b")] == [1, 0, 3, 2] == [start for _, start, *_ in runs(each, "n")]
    assert each.unwritten == {"places": 4}
    assert each.gather(module, "a").shape == (0, 4)
    assert tensor_coverage.classify(module, each, {}).constant == ("a", "places")
    assert map_learner.learn(module, module.load_weights, {}).unwritten == {"b": 4, "n": 4, "places": 4}


def case_a_transposing_loader_has_many_runs_and_is_exact() -> None:
    module = Plain(lambda _, value: value.t(), a=torch.randn(130, 70))
    export = {"a": module.a.t().contiguous()}
    each = learned(module, export)
    assert each.count == 130 * 70
    assert each.compare(module, export) == {}
    assert torch.equal(each.gather(module, "a"), export["a"])
    module.a[100, 3] += 1
    assert each.compare(module, export) == {"a": map_learner.Wrong(1, 3 * 130 + 100, 130 * 70)}
    assert "elements of a in another order" in tensor_coverage.misplaced(each)["a"]


def case_rows_in_another_order_are_misplaced_and_shards_are_not() -> None:
    rows = torch.arange(8).view(2, 2, 2).transpose(1, 2).reshape(-1)  # as rotary layouts are converted
    module = Plain(lambda _, value: value[rows], a=torch.randn(8, 5), b=torch.randn(8, 5))
    each = learned(module, {"a": module.a, "b": module.b})
    assert each.compare(module, {name: value[rows.argsort()] for name, value in module.named_parameters()}) == {}, "the map agrees with it"
    assert list(tensor_coverage.misplaced(each)) == ["a", "b"]
    module = Plain(lambda _, value: value[:, 2:4], a=torch.randn(8, 2))
    assert tensor_coverage.misplaced(learned(module, {"a": torch.zeros(8, 5)})) == {}


def case_a_changed_layout_is_an_error_not_a_smaller_comparison() -> None:
    module, export = Plain(a=torch.randn(4), b=torch.randn(4)), {"a": torch.zeros(4), "b": torch.zeros(4)}
    each = learned(module, export)
    raised(lambda: each.compare(module, {"a": export["a"]}), ValueError)
    raised(lambda: each.compare(module, {**export, "b": torch.zeros(2, 2)}), ValueError)
    module.a.data = torch.zeros(5)
    assert "learn it again" in str(raised(lambda: each.compare(module, export), map_learner.CannotMap))


def case_misplaced_names_swapped_parts_layers_and_experts() -> None:
    class Shifted(fused.Rank):
        def consume(self, own: fused.Weights, name: str, value: torch.Tensor) -> bool:
            if ".mlp.down_proj" in name:
                name = name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")
            return super().consume(own, name, value)

    class Swapped(fused.Rank):
        def slot(self, part: str) -> int:
            return {"q_proj": 1, "k_proj": 0}.get(part, super().slot(part))

        def place(self, expert: int) -> int:
            return (0, 1, 3, 2)[expert]

    ranks, weights = loaded(fused.Shape(), Shifted)
    found = tensor_coverage.misplaced(learned(ranks[0], weights))
    assert found == {f"model.layers.{i}.mlp.down_proj.weight": f"it holds model.layers.{1 - i}.mlp.down_proj.weight" for i in range(2)}
    clean, weights = loaded(fused.Shape())
    unsaid = tensor_coverage.misplaced(learned(clean[0], weights), fused={})
    assert len(unsaid) == 7  # three qkv, two gate_up, w13 and w2: not judged is said, not passed
    assert "name its slots" in unsaid["model.layers.0.self_attn.qkv_proj.weight"]
    ranks, weights = loaded(fused.Shape(), Swapped)
    found = tensor_coverage.misplaced(learned(ranks[0], weights))
    assert len(found) == 5
    assert "out of order" in found["model.layers.0.self_attn.qkv_proj.weight"]
    assert "experts.3" in found["model.layers.2.mlp.experts.w13_weight"]


def case_changed_buffers_that_are_not_exported_are_found() -> None:
    history = [{"w": "1", "bias": "1", "table": "1"}, {"w": "2", "bias": "2", "table": "1"}]
    assert tensor_coverage.unexported(history, {"w"}) == ["bias"]
    assert tensor_coverage.unexported([*history, {**history[1], "late": "1"}], {"w"}) == ["bias", "late"]
    raised(lambda: tensor_coverage.never_changed(history[:1]), ValueError)


def case_a_policy_is_watched_with_its_buffers_and_ties() -> None:
    module = Plain(a=torch.zeros(3), b=torch.zeros(2))
    module.head = module.a
    module.register_buffer("table", torch.zeros(2), persistent=False)
    module.register_buffer("still", torch.zeros(2))
    owned, renamed, part = tensor_coverage.Owned(), tensor_coverage.Owned(), tensor_coverage.Owned()
    for _ in range(3):
        with torch.no_grad():
            for value in (module.a, module.b, module.table):
                value.add_(1)
        owned.look(module, {"a": module.a, "b": module.b})  # a tied name is exported once
        renamed.look(module, {"x": torch.zeros(5)})  # every element under other names
        part.look(module, {"x": torch.zeros(3), "b": module.b[:1]})
    assert owned.unexported() == renamed.unexported() == ["table"]
    assert part.unexported() == ["a", "head", "table"]


def case_a_tensor_that_only_moved_is_not_derived() -> None:
    module = Plain(a=torch.zeros(3))
    module.register_buffer("table", torch.zeros(2))
    watch = tensor_coverage.LoaderWatch(module, learned(module, {"a": torch.zeros(3)}))
    module.table.add_(1)
    watch.look()
    found = tensor_coverage.classify(module, watch.map, watch.touched, watch.moved)
    assert (found.moved, found.derived, found.constant) == ({"table": "its bits changed with load 1"}, {}, ())
    assert found.row("0", [])["moved"] == found.moved
    assert found.row("0", [])["tensors"] == 2


def case_ten_million_elements_take_seconds() -> None:
    module = Plain(**{f"w{index}": torch.zeros(1250, 1000, dtype=torch.bfloat16) for index in range(8)})
    started = time.process_time()
    each = learned(module, dict(module.named_parameters()))
    assert each.count == 8
    assert time.process_time() - started < 8


def case_a_state_that_is_not_restored_is_an_error() -> None:
    module = Plain(a=torch.zeros(3), b=torch.zeros(3))
    saved = Saved(module)
    saved._storages.clear()  # as if the copies were lost
    module.a.add_(1)
    assert raised(saved.restore, NotRestored).names == ["a"]


def case_interleaved_views_and_aliases_of_changed_tensors() -> None:
    flat = torch.arange(8.0)
    module = Plain(even=flat[::2], odd=flat[1::2])
    found = tensor_coverage.classify(module, learned(module, {"even": torch.zeros(4), "odd": torch.zeros(4)}), {})
    assert found.written == ("even", "odd")
    module = Plain(partial(change_a, torch.exp), a=torch.zeros(4))
    module.again = module.a
    found = tensor_coverage.classify(module, learned(module, {"a": torch.zeros(4)}), {})
    assert found.shared == {"again": "a"}
    assert set(found.derived) == {"a"}
