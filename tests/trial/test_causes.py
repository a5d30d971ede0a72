"""Reading a diff: which path or line asks for which level, and what of it asks for none."""

from __future__ import annotations

import pytest

from seatrial.core.specs import Concern, Surface
from seatrial.evidence.changes import ChangedLine
from seatrial.trial.plan import Diff, LevelCause, read_diff, required
from tests.trial.fake import FakeLoop

ROWS = (
    Concern(name="papers", package="pkg", globs=("docs/**", "*.md", "data/**"), unless=("data/packing/**",)),
    Concern(name="mapping", globs=("src/map*.py",), levels=(0, 2), words=("remap",)),
    Concern(name="pins", globs=("pins.toml",), levels=(0, 1), only_with=("torch", "dependencies")),
)
SURFACES = (Surface(module="pkg.core", names=("build", "Model")), Surface(module="pkg.whole", levels=(2,)))


class Loop(FakeLoop):
    def concerns(self) -> tuple[Concern, ...]:
        return ROWS

    def surfaces(self) -> tuple[Surface, ...]:
        return SURFACES


def line(path: str, text: str, number: int = 1, within: str = "", removed: bool = False) -> ChangedLine:
    return ChangedLine(path, number, text, removed, within)


def diff(*paths: str, lines: tuple[ChangedLine, ...] = (), complete: bool = True, packages: tuple[str, ...] = ("pkg",)) -> Diff:
    return Diff("r", "b", paths, lines, complete, packages)


def asked(given: Diff) -> set[int]:
    return {cause.level for cause in read_diff(Loop(), given).causes}


def test_a_row_asks_for_all_its_levels_and_says_by_what() -> None:
    found = read_diff(Loop(), diff("src/mapping.py"))
    assert found.causes == [LevelCause(level, "r", "src/mapping.py", "matches src/map*.py", "mapping") for level in (0, 2)]
    assert found.causes[0].reason == "r: src/mapping.py matches src/map*.py (mapping)"
    assert (found.unmatched, found.not_needed) == ([], [])


def test_what_is_known_to_need_no_level_asks_for_none_whatever_it_says() -> None:
    lines = (line("docs/lora.md", "remap word_third"), line("README.md", "remap"))
    chosen = required(Loop(), [diff("docs/lora.md", "README.md", "data/third.py", lines=lines)])
    assert chosen.levels == ()
    assert chosen.not_needed == ("r: docs/lora.md", "r: README.md", "r: data/third.py")


def test_it_is_known_of_that_package_only() -> None:
    found = read_diff(Loop(), diff("docs/lora.md", lines=(line("docs/lora.md", "remap"),), packages=("other",)))
    assert found.unmatched == ["r: docs/lora.md"]
    assert {cause.level for cause in found.causes} == {0, 2}


def test_an_exception_is_not_meant() -> None:
    found = read_diff(Loop(), diff("data/packing/x.py"))
    assert found.unmatched == ["r: data/packing/x.py"]


def test_one_path_that_matters_is_enough() -> None:
    chosen = required(Loop(), [diff("docs/a.md", "src/new.py")])
    assert [level.number for level in chosen.levels] == [0, 1]  # the defaults
    assert chosen.unmatched == ("r: src/new.py",)


def test_an_incomplete_diff_of_papers_is_not_believed() -> None:
    assert [level.number for level in required(Loop(), [diff("docs/a.md", complete=False)]).levels] == [0, 1]


def test_a_word_is_found_with_its_line() -> None:
    lines = (line("docs/a.md", "remap", 3), line("src/new.py", "x = 1", 4), line("src/new.py", "  y = remap(x)", 5, removed=True))
    causes = read_diff(Loop(), diff("docs/a.md", "src/new.py", lines=lines)).causes
    assert [(cause.level, cause.path, cause.line, cause.rule, cause.text) for cause in causes] == [
        (level, "src/new.py", 5, "says 'remap'", "- y = remap(x)") for level in (0, 2)
    ]


PINS = "pins.toml"


@pytest.mark.parametrize(
    ("lines", "complete", "levels"),
    [
        ((line(PINS, 'select = ["E"]', within="[tool.ruff]"),), True, set()),
        ((line(PINS, '"torch>=2"'),), True, {0, 1}),
        ((line(PINS, '"mlflow>=3"', within="dependencies = ["),), True, {0, 1}),
        ((line(PINS, "pytorch = 1"),), True, set()),
        ((), True, {0, 1}),  # nothing could be read
        ((line(PINS, "x"),), False, {0, 1}),
        ((line(PINS, "remap word_third"),), True, set()),  # no source: only the pins count there
    ],
)
def test_a_pin_file_counts_by_what_it_pins(lines: tuple[ChangedLine, ...], complete: bool, levels: set[int]) -> None:
    assert asked(diff(PINS, lines=lines, complete=complete)) == levels


def test_a_pin_file_without_a_pin_needs_no_level() -> None:
    chosen = required(Loop(), [diff(PINS, lines=(line(PINS, "line-length = 100"),))])
    assert (chosen.levels, chosen.not_needed) == ((), ("r: pins.toml",))


CORE = "src/pkg/core.py"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((line(CORE, "    x = 1", 5, "def build(a):"),), ["build"]),
        ((line(CORE, "    x = 1", 5, "class Model(Base):"),), ["Model"]),
        ((line(CORE, "    x = 1", 5, "def builder(a):"),), []),
        ((line(CORE, "async def build(", 5, "def other():"),), ["build"]),
        ((line(CORE, "def build(", 5), line(CORE, "    x", 6), line(CORE, "def other():", 7), line(CORE, "    y", 8)), ["build"]),
        ((line(CORE, "def build(", 5), line(CORE, "z = 1", 50, "def other():")), ["build"]),
        ((line(CORE, "def other():", 5), line(CORE, "z = 1", 50, "def build():")), ["build"]),
        ((line("src/pkg/other.py", "def build():"),), []),
        ((line("pkg/core/__init__.py", "def build():"),), ["build"]),
    ],
)
def test_a_line_inside_what_the_loop_imports(lines: tuple[ChangedLine, ...], told: list[str]) -> None:
    rules = [cause.rule for cause in read_diff(Loop(), diff(lines[0].path, lines=lines)).causes if cause.line]
    assert rules == [f"is in {name}, which Fake imports" for name in told]


def test_a_module_may_be_imported_whole_and_that_alone_keeps_no_path_from_the_defaults() -> None:
    whole = "src/pkg/whole.py"
    found = read_diff(Loop(), diff(whole, lines=(line(whole, "a = 1", 3), line(whole, "b = 1", 9))))
    assert [(cause.level, cause.line, cause.rule) for cause in found.causes] == [(2, 3, "is in pkg.whole, which Fake imports")]
    assert found.unmatched == [f"r: {whole}"]


def test_a_row_without_levels_must_name_its_package() -> None:
    with pytest.raises(ValueError, match="paths that need no level are those of one package"):
        Concern(name="x", globs=("*",))
