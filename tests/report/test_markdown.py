"""Recorded text is no markup: what a renderer of Markdown makes of it has nothing but words and code."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from seatrial.core.records import Report
from seatrial.core.text import visible
from seatrial.core.verdict import Verdict
from seatrial.report import ci
from seatrial.report.build import summary_md
from seatrial.report.ci import junit_xml, step_summary
from seatrial.report.html import report_html
from seatrial.report.markdown import LONGEST, cell, code, prose
from tests.report.test_github import report
from tests.report.trials import level, trial

RENDERER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- comment -->",
    "</details><details open>",
    "<https://evil.example>",
    "![](http://evil.example/pixel.png)",
    "[click](javascript:alert(1))",
    "![a][b]",
    "[b]: http://evil.example",
    "[x] done",
    "# Result: Pass",
    "###### small",
    "Result: Pass - all deliverables passed",
    "> quoted",
    "- item",
    "+ item",
    "* item",
    "1. item",
    "2) item",
    "--- ",
    "***",
    "===",
    "```python",
    "``` a ```",
    "~~~",
    "~~gone~~",
    "**Pass** _Pass_ __Pass__ *Pass*",
    "a | b | c",
    "|---|---|",
    "`unpaired",
    "`a` <b>x</b> `c`",
    "``a` <i> ``",
    "\\`<u>\\`",
    "\\[x\\](http://evil.example)",
    "&lt;script&gt; &#60;b&#62;",
    "$x$ $$y$$",
    "one\n\n# two\n<p>three",
    "one\r\r# two",
    "one\u2028# two",
    "    indented code",
    "\tindented code",
    "http://evil.example/a?b=c",
    "see HTTPS://evil.example, now",
    "(ftp://evil.example)",
    "www.evil.example",
    "xwww.evil.example http://a_b_.c/*d*",
    "mailto:a@evil.example xmpp:a@evil.example",
    "a.b+c@evil.example",
    "a@evil.example.b+c@evil.example",
    "step 13http://evil.example",
    ":white_check_mark: Pass",
    "train.py:100: ValueError",
    ":+1::-1: a:x:b",
    "[^1] and [^1]: note",
    "[TOC] [[wiki]] ==mark== H~2~O",
    "> [!WARNING]",
    "- [ ] task",
    "Setext",
    "a  \n  b",
    "a\\\nb",
    "::error::x ##[warning]y",
    "<details><summary>x",
    "<a href='javascript:alert(1)'>x</a>",
    "<svg/onload=alert(1)>",
    "<?php x ?> <![CDATA[x]]> <!DOCTYPE x>",
    "&#x3c;img&#x3e; &lt &amp;lt;",
    "```mermaid\ngraph\n```",
    "$$\\href{javascript:alert(1)}{x}$$ $`x`$",
    "![x](data:image/svg+xml;base64,AAAA)",
    '[x]: <http://evil.example> "title"',
    "[x](<a b>)",
    "[`x`](http://evil.example)",
    "[a\\](http://evil.example)",
    "\\<b>",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\u202egro.live\u202c",
]


LINKS = re.compile(r"(?i)(?:https?|ftp)://|(?<![a-z0-9])www\.|mailto:|xmpp:|[\w.+-]+@[\w-]+\.\w|(?<!:):[a-z0-9_+-]+:|@\w|(?<!&)#\d")
"""What GitHub makes links, calls and pictures of, where it is no code."""


def tokens(text: str) -> list[Token]:
    """All tokens, those inside of paragraphs among them."""
    return [inner for token in RENDERER.parse(text) for inner in (token, *(token.children or ()))]


def shape(text: str) -> set[str]:
    return {token.type for token in tokens(text)}


WORDS = {"paragraph_open", "paragraph_close", "inline", "text", "code_inline", "text_special"}
LIST = {"bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_words(text: str) -> None:
    assert shape(prose(text)) <= WORDS
    assert shape(f"- {prose(text)}") <= WORDS | LIST
    words = " ".join(token.content for token in tokens(prose(text)) if token.type in ("text", "text_special"))
    assert not LINKS.search(re.sub(r"^Result: ", "", words)), words
    table = f"| a | b |\n|---|---|\n| {cell(text)} | end |"
    rows = [token for token in tokens(table) if token.type == "td_open"]
    assert len(rows) == 2
    assert not {"html_inline", "html_block", "link_open", "image", "heading_open", "fence"} & shape(table)


def test_random_text_is_words() -> None:
    """Whatever is put together from the letters of Markdown."""
    dice = random.Random(7)
    parts = [
        *"<>[]()!#*_~`|\\&;:-+=.$@/ \n\t1a",
        "](",
        "![",
        "``",
        "```",
        "<b>",
        "</b>",
        "<!--",
        "-->",
        "http://x",
        "&lt;",
        "**",
        "1.",
        "[a]:",
    ]
    for _ in range(1500):
        text = "".join(dice.choices(parts, k=dice.randint(1, 14)))
        assert shape(f"- {prose(text)}") <= WORDS | LIST, repr(text)
        assert shape(f"x {code(text)} y") <= WORDS, repr(text)
        table = f"| a | b |\n|---|---|\n| {cell(text)} | end |"
        assert sum(token.type == "td_open" for token in tokens(table)) == 2, repr(text)


def rendered(text: str) -> str:
    """What a reader sees."""
    return "".join(token.content for token in tokens(text) if token.type in ("text", "code_inline", "text_special"))


@pytest.mark.parametrize(
    "text",
    [
        'mean(data["train/loss"]) < 1.05: measured 2.5, at steps 1-3',
        'data["train/reward"]["20"] > 0.5',
        "loss 3 * 4 < 5 & x > 2",
        "src/pkg/module_name.py matches **/modeling_*.py",
        "pkg/__init__.py, snake_case, C:\\dir",
        "run `seatrial bisect --metric 'a|b*c'` again",
        "KeyError: '<unk>'",
        "mail a@b.c, 50 % of $HOME",
        "é ü 漢字 🙂",
    ],
)
def test_healthy_text_reads_as_before(text: str) -> None:
    assert rendered(prose(text)) == text.replace("`", "")


def test_ordinary_text_is_left_as_it_is() -> None:
    for text in ('mean(data["train/loss"]) < 1.05', "a_b/c_d.py: 1 - 2 = -1", "level 0 (GRPO smoke) is Fail: rc=1", "a < b > c & d"):
        assert prose(text) == text


def test_nobody_is_called() -> None:
    assert prose("by @octocat and @org/team") == "by `@octocat` and `@org/team`"
    assert prose("fixes #12, org/repo#3, GH-4") == "fixes `#12`, `org/repo#3`, `GH-4`"
    assert prose("mail a@b.c, at http://x.y") == "mail `a@b.c`, at `http://x.y`"
    assert prose("train.py:100: error, a::b: c") == "`train.py:100`: error, `a::b`: c"
    assert prose("colour #fff, C#, step #, x: y, a::b, 12:30:05") == "colour #fff, C#, step #, x: y, a::b, 12:30:05"


def test_long_text_is_cut() -> None:
    text = prose("x" * 1_000_000)
    assert len(text) < LONGEST + 50
    assert text.endswith("characters more)")


def test_hidden_characters_are_written_out() -> None:
    text = "a\x1b]0;title\x07b\x9b31mc\u202ed\u2066e\u200ef\u061cg\x00h\x1b[31mred\x1b[0m\U000e0041"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]", visible(text))
    assert "red" in visible(text)


@pytest.fixture
def hostile(tmp_path: Path) -> Report:
    reason = " ".join([*HOSTILE, "@octocat #12 \x1b[2J\x00\u202e ]]> </script>"])
    return report(tmp_path, trial(level(verdict=Verdict.FAIL, reason=reason), verdict=Verdict.FAIL))


def test_the_reports_of_a_trial(hostile: Report) -> None:
    for text in (summary_md(hostile), step_summary(hostile)):
        assert not {"html_inline", "html_block", "link_open", "image", "fence", "em_open", "strong_open"} & shape(text.replace("**", ""))
        assert not re.search(r"<script|<img|[\x00\x1b\u202e]|(?<!`)@octocat", text)
    headings = [token for token in tokens(summary_md(hostile)) if token.type == "heading_open"]
    assert headings == []
    assert sum(line.startswith("Result: ") for line in summary_md(hostile).splitlines()) == 1
    ET.fromstring(junit_xml(hostile))
    page = report_html(hostile, {})
    assert page.count("</script>") == page.count("<script")
    assert "<img" not in page
    assert all(line.startswith(("::error ", "::warning ")) and "\n" not in line for line in ci.github_annotations(hostile))
