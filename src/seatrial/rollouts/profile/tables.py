"""A profile as tables of text, which Markdown and the page show alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from seatrial.rollouts.profile.model import AtK, Estimate, Group, Numbers, Profile, Task

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
    """The value with its interval."""
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
    named = {
        "reward": overall.reward,
        "input tokens": overall.input_tokens,
        "output tokens": overall.output_tokens,
        "turns": overall.turns,
        "latency in seconds": overall.latency_s,
        **overall.metrics,
    }
    rows = [(name, *_cells(numbers)) for name, numbers in named.items() if numbers]
    head = ("Quantity", "Rollouts", "Mean", "Std", "Min", "Median", "95 %", "Max", "Total")
    return Table("Rollouts", "Over all rollouts that worked and tell it, each counting once.", head, tuple(rows))


def _cells(found: Numbers) -> tuple[str, ...]:
    middle = (found.mean, found.std, found.min, found.median, found.p95, found.max)
    return (str(found.n), *(figure(value) for value in middle), f"{found.total:.10g}")


def _counted(title: str, note: str, profile: Profile, field: str) -> Table:
    """One row per group, one column per name."""
    groups = profile.summary.groups
    names = tuple(getattr(groups[0], field))
    rows = [(_named(group), *(str(getattr(group, field).get(name, 0)) for name in names)) for group in groups]
    return Table(title, note, ("Group", *names), tuple(rows) if names else ())


def _tasks(profile: Profile) -> Iterator[Table]:
    known = [task for task in profile.tasks if task.reward]
    # By what is sure: one miss of one rollout says less than sixteen misses of sixteen.
    hard = sorted(known, key=lambda task: (task.pass_high or 0, _mean(task)))
    easy = sorted(known, key=lambda task: (-(task.pass_low or 0), -_mean(task)))
    yield _listed("Hardest tasks", "By the upper end of their pass rate's interval.", hard)
    yield _listed("Easiest tasks", "By the lower end of it.", easy)
    yield _listed("Tasks that never pass", "", [task for task in known if task.pass_rate == 0])
    yield _listed("Tasks that always pass", "", [task for task in known if task.pass_rate == 1])
    yield _listed("Tasks without a rollout", "Nothing is known of them.", [task for task in profile.tasks if not task.reward])


def _mean(task: Task) -> float:
    return task.reward.mean if task.reward else 0.0


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
