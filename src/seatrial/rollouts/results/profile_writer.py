"""Writes a profile as JSON, Parquet, Markdown and an offline HTML page (inline SVG, no script), each atomically.

profile.json, which the others belong to, comes last.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from seatrial.core.errors import UserError
from seatrial.core.files import replacing, write_bytes, write_json, write_text
from seatrial.report.html import page
from seatrial.report.markdown import cell, prose
from seatrial.rollouts.results.profile_data import QUANTITIES, AtK, Estimate, Group, Histogram, Numbers, Profile, Task

SHOWN = 10
"""Tasks of a list; tasks.jsonl has all of them."""


class Table(NamedTuple):
    """One table; the first cell of a row names it."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def answer(profile: Profile) -> str:
    """The first sentence: what came out, and of how much."""
    overall = profile.overall
    if overall.mean.value is None:
        return f"No rollout has worked yet: {overall.expected} are expected, {sum(overall.failed.values())} failed for good."
    said = f"Mean reward {estimate(overall.mean)} over {overall.measured} of {overall.tasks} tasks and {overall.ok} rollouts."
    if overall.ok == overall.expected:
        return f"{said} Complete."
    return (
        f"{said} Partial: {share(overall.coverage)} of {overall.expected} rollouts, {sum(overall.failed.values())} failed for good, "
        f"{overall.missing} missing; the figures hold for those that are there."
    )


def tables(profile: Profile) -> tuple[Table, ...]:
    """In reading order; without those that would be empty."""
    overall = profile.overall
    made = (
        _groups(profile),
        _at_k(overall),
        _quantities(overall),
        _counted("Failures", "Units given up, by class and group; none of them counts as a reward.", profile, "failed"),
        _counted("Finish reasons", "As the server said; rollouts that worked.", profile, "finish"),
        *_tasks(profile),
    )
    return tuple(table for table in made if table.rows)


def share(value: float | None) -> str:
    """A part of 1 as a percentage, which says 100 % and 0 % only of all and of none."""
    if value is None:
        return ""
    if 0 < value < 0.0005 or 0.9995 <= value < 1:
        return "< 0.1 %" if value < 0.5 else "> 99.9 %"
    return f"{value:.1%}".replace("%", " %")


def figure(value: float | None) -> str:
    """Five digits are enough for people."""
    return "" if value is None else f"{value:.5g}"


def estimate(found: Estimate) -> str:
    return figure(found.value) if found.low is None else f"{figure(found.value)} ({figure(found.low)} to {figure(found.high)})"


def _share_at(found: AtK) -> str:
    return share(found.value) if found.low is None else f"{share(found.value)} ({share(found.low)} to {share(found.high)})"


def _used(found: AtK, group: Group) -> str:
    """Says that a figure is not over all tasks that the mean beside it is over."""
    return f" [{found.tasks} tasks]" if found.tasks < group.measured else ""


def _named(group: Group) -> str:
    return "all tasks" if group.by == "overall" else f"{group.by}: {group.name}"


def _groups(profile: Profile) -> Table:
    ks = profile.summary.ks
    shown = dict.fromkeys((0, len(ks) - 1))
    head = ("Group", "Tasks", "Rollouts", "Coverage", "Failed", "Missing", "Mean reward", *(f"pass@{ks[place]}" for place in shown))
    last = ks[-1]
    rows = [
        (
            _named(group),
            f"{group.measured} of {group.tasks}",
            f"{group.ok} of {group.expected}",
            share(group.coverage),
            str(sum(group.failed.values())),
            str(group.missing),
            estimate(group.mean),
            *(_share_at(group.pass_at[place]) + _used(group.pass_at[place], group) for place in shown),
            figure(group.best_at[-1].value) + _used(group.best_at[-1], group),
            figure(group.majority_at[-1].value) + _used(group.majority_at[-1], group),
            str(group.never),
            str(group.always),
            share(group.truncated),
        )
        for group in profile.summary.groups
    ]
    note = "Mean reward: over tasks, each counting once, with its interval of 95 %. Never, always: tasks with a pass rate of 0, of 1."
    return Table("Groups", note, (*head, f"best@{last}", f"maj@{last}", "Never", "Always", "Truncated"), tuple(rows))


def _at_k(overall: Group) -> Table:
    columns = zip(overall.pass_at, overall.best_at, overall.majority_at, overall.average_of, strict=True)
    rows = [
        (
            str(passed.k),
            f"{passed.tasks} of {overall.tasks}",
            _share_at(passed),
            estimate(best),
            estimate(majority),
            str(majority.tasks),
            estimate(average),
            figure(average.std_dev_across_runs),
            figure(average.std_err_across_runs),
        )
        for passed, best, majority, average in columns
    ]
    head = ("k", "Tasks used", "pass@k", "best@k", "maj@k", "Tasks voting", "Mean of the first k", "Std across runs", "Std error")
    return Table("By number of rollouts", "Tasks with fewer than k rollouts are left out.", head, tuple(rows))


def _quantities(overall: Group) -> Table:
    named = {title: getattr(overall, name) for name, title in QUANTITIES.items()} | dict(overall.metrics)
    rows = []
    for name, found in ((name, found) for name, found in named.items() if found):
        middle = (found.mean, found.std, found.min, found.median, found.p95, found.max)
        rows.append((name, str(found.n), *map(figure, middle), f"{found.total:.10g}"))
    head = ("Quantity", "Rollouts", "Mean", "Std", "Min", "Median", "95 %", "Max", "Total")
    return Table("Rollouts", "Over all rollouts that worked and tell it, each counting once.", head, tuple(rows))


def _counted(title: str, note: str, profile: Profile, field: str) -> Table:
    groups = profile.summary.groups
    names = tuple(getattr(groups[0], field))
    rows = [(_named(group), *(str(getattr(group, field).get(name, 0)) for name in names)) for group in groups]
    return Table(title, note, ("Group", *names), tuple(rows) if names else ())


def _tasks(profile: Profile) -> Iterator[Table]:
    known = [task for task in profile.tasks if task.reward]
    means = {task.index: task.reward.mean for task in known if task.reward}
    # By what is sure: one miss of one rollout says less than sixteen misses of sixteen.
    hard = sorted(known, key=lambda task: (task.pass_high or 0, means[task.index]))
    easy = sorted(known, key=lambda task: (-(task.pass_low or 0), -means[task.index]))
    yield _listed("Hardest tasks", "By the upper end of their pass rate's interval.", hard)
    yield _listed("Easiest tasks", "By the lower end of it.", easy)
    yield _listed("Tasks that never pass", "", [task for task in known if task.pass_rate == 0])
    yield _listed("Tasks that always pass", "", [task for task in known if task.pass_rate == 1])
    yield _listed("Tasks without a rollout", "Nothing is known of them.", [task for task in profile.tasks if not task.reward])


def _listed(title: str, note: str, tasks: Sequence[Task]) -> Table:
    rows = [
        (
            task.id,
            task.dataset,
            task.source,
            f"{task.n} of {task.expected}",
            f"{share(task.pass_rate)} ({share(task.pass_low)} to {share(task.pass_high)})" if task.n else "",
            figure(task.reward.mean if task.reward else None),
            figure(task.output_tokens.mean if task.output_tokens else None),
        )
        for task in tasks[:SHOWN]
    ]
    left = f" The first {SHOWN} of {len(tasks)}; tasks.jsonl has all." if len(tasks) > SHOWN else ""
    head = ("Task", "Dataset", "Source", "Rollouts", "Pass rate", "Mean reward", "Mean output tokens")
    return Table(title, (note + left).strip(), head, tuple(rows))


def profile_markdown(profile: Profile) -> str:
    summary = profile.summary
    lines = [f"# Reward profile of {prose(summary.campaign)}", "", prose(answer(profile)), ""]
    for table in tables(profile):
        note = [prose(table.note), ""] if table.note else []
        head = [_table_line(table.head), "|" + "---|" * len(table.head)]
        lines += [f"## {prose(table.title)}", "", *note, *head, *map(_table_line, table.rows), ""]
    lines += ["## How to read it", "", *(f"- {rule}" for rule in summary.rules)]
    found = ", ".join(f"{count} {name}" for name, count in summary.journal if count)
    lines += [f"- Journal: {found or 'nothing torn, foreign or twice'}.", "", f"Made {summary.made} by seatrial {summary.seatrial}."]
    return "\n".join(lines) + "\n"


def _table_line(cells: tuple[str, ...]) -> str:
    """Recorded text can neither end a cell nor a line."""
    return "| " + " | ".join(map(cell, cells)) + " |"


WIDTH, HEIGHT = 420, 150


def profile_html(profile: Profile) -> str:
    curves = (_curve("pass@k", profile.overall.pass_at), _curve("maj@k", profile.overall.majority_at))
    return page(
        "profile.html.j2",
        profile=profile,
        summary=profile.summary,
        answer=answer(profile),
        tables=tables(profile),
        curves=[curve for curve in curves if curve["dots"]],
        charts=[_chart(histogram) for histogram in profile.summary.histograms],
        size={"width": WIDTH, "height": HEIGHT},
        share=share,
    )


def _chart(histogram: Histogram) -> dict[str, Any]:
    most = max(bar.count for bar in histogram.bars)
    step = WIDTH / len(histogram.bars)
    columns = []
    for place, bar in enumerate(histogram.bars):
        # A bar of one among thousands must still be seen.
        height = max(1.5, HEIGHT * bar.count / most) if bar.count else 0.0
        box = {"x": round(step * place + 1, 1), "y": round(HEIGHT - height, 1), "width": round(step - 2, 1), "height": round(height, 1)}
        columns.append({**box, "label": bar.label, "amount": bar.count})
    total = sum(bar.count for bar in histogram.bars)
    note = f"{total} {histogram.of}; the highest bar has {most}"
    return {"title": histogram.name.capitalize(), "note": note, "columns": columns}


def _curve(name: str, figures: Sequence[AtK]) -> dict[str, Any]:
    """k in equal steps, as it is doubled; values from 0 below to 1 above."""
    step = WIDTH / (len(figures) + 1)
    dots = [
        {
            "x": round(step * place, 1),
            "y": round(HEIGHT * (1 - min(1.0, max(0.0, found.value))), 1),
            "k": found.k,
            "text": f"{found.value:.4g}",
        }
        for place, found in enumerate(figures, 1)
        if found.value is not None
    ]
    return {"name": name, "dots": dots, "points": " ".join(f"{dot['x']},{dot['y']}" for dot in dots)}


_AT_K = ("pass_at", "best_at", "majority_at")
_PLAIN = ("index", "id", "dataset", "agent", "source", "expected", "n", "missing", "coverage", "correct", "pass_rate", "truncated")


def write_profile(profile: Profile, directory: Path) -> tuple[Path, ...]:
    """The files. Without pyarrow all but profile.parquet are written, then a UserError says so."""
    parquet = directory / "profile.parquet"
    paths = tuple(directory / name for name in ("tasks.jsonl", "profile.md", "profile.html", "profile.json"))
    with replacing(paths[0]) as stream:
        for task in profile.tasks:
            fields: dict[str, Any] = {name: getattr(task, name) for name in Task.__slots__}
            fields |= {name: {str(k): value for k, value in zip(profile.summary.ks, fields[name], strict=True)} for name in _AT_K}
            stream.write(orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE))
    write_text(paths[1], profile_markdown(profile))
    write_text(paths[2], profile_html(profile))
    packed = _parquet(profile)
    if packed is not None:
        write_bytes(parquet, packed)
    else:
        # One of an earlier profile would not belong to the others.
        parquet.unlink(missing_ok=True)
    write_json(paths[3], profile.summary)
    if packed is None:
        message = f"{parquet}: not written, since pyarrow is not installed; the other files of the profile are"
        raise UserError(message, 'pip install "seatrial[rollouts]"')
    return (*paths, parquet)


def _parquet(profile: Profile) -> bytes | None:
    """One row per task, flat; None where pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    tasks = profile.tasks
    columns: dict[str, Any] = {name: [getattr(task, name) for task in tasks] for name in _PLAIN}
    columns["agent"] = pyarrow.array(columns["agent"], pyarrow.string())
    columns["tags"] = pyarrow.array([list(task.tags) for task in tasks], pyarrow.list_(pyarrow.string()))
    columns["failed"] = [sum(task.failed.values()) for task in tasks]
    for kind in profile.overall.failed:
        columns[f"failed/{kind}"] = [task.failed.get(kind, 0) for task in tasks]
    for name in ("pass_low", "pass_high", "pass_rate", "truncated"):
        columns[name] = _floats([getattr(task, name) for task in tasks])
    for name in _AT_K:
        for place, k in enumerate(profile.summary.ks):
            columns[f"{name}/{k}"] = _floats([getattr(task, name)[place] for task in tasks])
    for name in QUANTITIES:
        columns |= _flat(name, [getattr(task, name) for task in tasks])
    for name in profile.overall.metrics:
        columns |= _flat(f"metrics/{name}", [task.metrics.get(name) for task in tasks])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _floats(values: Sequence[float | None]) -> Any:
    """A column keeps its type when nothing is in it."""
    import pyarrow

    return pyarrow.array(values, pyarrow.float64())


def _flat(name: str, found: Sequence[Numbers | None]) -> dict[str, Any]:
    fields = [field for field in Numbers.__slots__ if field != "n"]
    return {f"{name}/{field}": _floats([getattr(one, field) if one else None for one in found]) for field in fields}
