"""Skills: what they say exists, and installing them never loses anything."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from seatrial.cli import skill
from tests.cli.command import inside
from tests.cli.mentions import all_flags, calls, problems

ROOT = Path(__file__).parents[2]
NAME = "seatrial-verl"
GUIDE = (skill.SKILLS / NAME / skill.GUIDE).read_text(encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is a git repository, with the working directory inside it."""
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "src").mkdir()
    monkeypatch.chdir(tmp_path / "project" / "src")
    return tmp_path / "project"


@pytest.mark.parametrize("name", skill.skills())
def test_every_command_and_flag_of_a_skill_exists(name: str) -> None:
    text = (skill.SKILLS / name / skill.GUIDE).read_text(encoding="utf-8")
    assert problems(text) == []
    assert len([words for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for words in calls(block)]) > 5


PAGES = (
    *("skills", "loop-verl", "loop-nemo-rl", "isolate", "localize", "baseline"),
    *("rollouts", "reward-profile", "sandbox", "refit", "bridge", "bisect"),
    *("history", "functional"),
)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_of_its_page_exists(page: str) -> None:
    assert problems((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", skill.skills())
def test_a_skill_has_the_front_matter_that_agents_read(name: str) -> None:
    text = (skill.SKILLS / name / skill.GUIDE).read_text(encoding="utf-8")
    matter = skill.front_matter(text)
    assert list(matter) == ["name", "description", "when_to_use"]
    assert matter["name"] == name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert len(name) <= 64
    for value in matter.values():
        assert 0 < len(value) <= 1024
        assert value[0].isalnum(), "a plain YAML value"
        assert not re.search(r": | #|:$", value), "would need quotes in YAML"
    assert len(text.splitlines()) <= 120
    assert max(map(len, text.splitlines()[5:])) <= 140


def in_block(line: str) -> str:
    return f"```bash\n{line}\n```\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (in_block("seatrial run trl --invented"), "--invented"),
        (in_block("seatrial run trl \\\n  --level 0 \\\n  --invented"), "--invented"),
        (in_block("cd x && FOO=1 seatrial judge trl --log a --nope 3 | tee b"), "--nope"),
        (in_block("seatrial fly"), "no command 'fly'"),
        (in_block("seatrial skill fly"), "no command 'fly'"),
        (in_block("seatrial skill"), "no command"),
        (in_block("seatrial judge trl"), "Missing parameter: logs"),
        (in_block("seatrial report a b"), "unexpected extra argument"),
        (in_block("seatrial report trials/RUN --format pdf"), "pdf"),
        (in_block("seatrial run tlr"), "unknown loop 'tlr'"),
        (in_block("seatrial run trl --level 9"), "9"),
        (in_block("seatrial run trl --set options.invented=1"), "no option invented"),
        (in_block("seatrial env build none"), "no environment 'none'"),
        ("Use `seatrial run --invented`.", "no flag --invented"),
        ("Use `seatrial fly …`.", "no command 'fly'"),
        ("Use `seatrial report --log x`.", "no flag --log"),
        ("Add `--invented`.", "no flag --invented"),
        ("Add `-Z`.", "no flag -Z"),
    ],
)
def test_what_does_not_exist_is_found(text: str, expected: str) -> None:
    (problem,) = problems(text)
    assert expected in problem


@pytest.mark.parametrize(
    "text",
    [
        in_block("seatrial run trl --level 0 -- --learning_rate 1e-4   # theirs"),
        in_block("python3 other.py --invented"),
        "`seatrial judge trl`, `seatrial skill`, `seatrial run … --on slurm:PROFILE -- a=b`, `--json`, `a --invented`, `--`",
    ],
)
def test_what_exists_or_is_not_ours_is_left_alone(text: str) -> None:
    assert problems(text) == []


def test_flags_of_inner_commands_are_known() -> None:
    assert {"--to", "--rebuild", "--version", "--log"} <= all_flags()


def test_list_and_show() -> None:
    answer = inside("skill", "list")
    assert answer.code == 0
    assert f"{NAME}\tProves " in answer.out
    entries = json.loads(inside("skill", "list", "--json").out)
    assert [entry["name"] for entry in entries] == list(skill.skills())
    for entry in entries:
        assert entry.keys() == {"name", "description", "when_to_use", "path"}
        assert Path(entry["path"], skill.GUIDE).is_file()
    assert inside("skill", "show", NAME).out == GUIDE


def test_the_folder_at_the_root_is_the_packaged_one() -> None:
    assert (ROOT / "skills").resolve() == skill.SKILLS.resolve()


def test_every_file_of_a_skill_is_packaged() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["seatrial"]
    suffixes = {path.suffix for path in skill.SKILLS.rglob("*") if path.is_file()}
    assert {f"**/*{suffix}" for suffix in suffixes} <= set(patterns)


def test_installing_twice_does_nothing(project: Path) -> None:
    place = project / ".claude" / "skills" / NAME
    answer = inside("skill", "install")
    assert answer.code == 0
    assert f"{NAME}: installed: {place}\n" in answer.out
    assert {path.name for path in place.parent.iterdir()} == set(skill.skills())
    assert (place / skill.GUIDE).read_text(encoding="utf-8") == GUIDE
    before = (place / skill.GUIDE).stat()
    answer = inside("skill", "install", NAME, NAME)
    assert (answer.code, answer.out) == (0, f"{NAME}: already there: {place}\n")
    assert (place / skill.GUIDE).stat() == before


def test_an_edited_skill_is_replaced_only_by_force(tmp_path: Path) -> None:
    guide, own = tmp_path / NAME / skill.GUIDE, tmp_path / NAME / "notes.md"
    guide.parent.mkdir()
    guide.write_text("mine\n")
    own.write_text("also mine\n")
    answer = inside("skill", "install", "--to", tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert str(guide) in answer.err
    assert "--force" in answer.err
    assert guide.read_text() == "mine\n"
    answer = inside("skill", "install", NAME, "--to", tmp_path, "--force", "--json")
    assert json.loads(answer.out) == [{"name": NAME, "path": str(tmp_path / NAME), "state": "replaced"}]
    assert guide.read_text(encoding="utf-8") == GUIDE
    assert own.read_text() == "also mine\n"


def test_nothing_is_written_when_one_of_several_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    for name in ("a", "b"):
        (made / name).mkdir(parents=True)
        (made / name / skill.GUIDE).write_text(f"---\nname: {name}\n---\n")
    monkeypatch.setattr(skill, "SKILLS", made)
    (target / "b").mkdir(parents=True)
    (target / "b" / skill.GUIDE).write_text("mine\n")
    assert inside("skill", "install", "--to", target).code == 2
    assert not (target / "a").exists()
    assert inside("skill", "install", "a", "--to", target).code == 0


def refused(target: Path) -> str:
    answer = inside("skill", "install", "--to", target)
    assert (answer.code, answer.out) == (2, "")
    assert "Traceback" not in answer.err
    assert "  fix: " in answer.err
    return answer.err


def test_a_target_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert f"{file}: is a file, not a directory" in refused(file)
    assert f"{file}: is a file, not a directory" in refused(file / "below")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / NAME).write_text("")
    assert f"{tmp_path / 'a' / NAME}: is a file" in refused(tmp_path / "a")
    (tmp_path / "b" / NAME / skill.GUIDE).mkdir(parents=True)
    assert "Is a directory" in refused(tmp_path / "b")
    assert "/proc/seatrial" in refused(Path("/proc/seatrial"))


def test_an_unknown_skill_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for words in (("install", NAME, "../x", "--to", tmp_path / "t"), ("show", "../x")):
        answer = inside("skill", *words)
        assert answer.code == 2
        assert f"no skill is called '../x'; known: {', '.join(skill.skills())}" in answer.err
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ((), "work/sub/.claude/skills"),
        (("work/.git",), "work/.claude/skills"),
        (("work/.git", "work/.agents"), "work/.agents/skills"),
        (("work/.git", "work/.agents", "work/.claude"), "work/.claude/skills"),
        (("work/.git", "work/.agents/skills", "work/.claude"), "work/.agents/skills"),
        (("work/.git", "work/.agents/skills", "work/.claude/skills"), "work/.claude/skills"),
        (("work/.git", "work/sub/.agents"), "work/sub/.agents/skills"),
        ((".claude/skills", ".agents"), "work/sub/.claude/skills"),
        ((".claude/skills", ".git"), ".claude/skills"),
    ],
)
def test_where_skills_go(tmp_path: Path, there: tuple[str, ...], expected: str) -> None:
    start = tmp_path / "work" / "sub"
    start.mkdir(parents=True)
    for name in there:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert skill.default_target(start, home=tmp_path) == tmp_path / expected


def test_text_without_front_matter_is_a_defect() -> None:
    for text in ("", "# Title\n", "---\nname: x\n", "x\n---\nname: x\n---\n"):
        with pytest.raises(ValueError, match="no front matter"):
            skill.front_matter(text)
