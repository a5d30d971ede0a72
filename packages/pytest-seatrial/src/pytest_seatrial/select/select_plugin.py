"""`pytest --seatrial-select`: run only the tests that a change can reach, and record what each of them depends on.

- Off unless asked for: `--seatrial-select` selects and records, `--seatrial-record` runs everything and records, `--seatrial-select-why`
  selects and gives one line per selected test. Recording wins over selecting.
- `-k` or a node id on the command line decides alone; they are recorded all the same.
- Light at import: the standard library and pytest, and of that nothing which older versions lack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_seatrial.select.recording import Contexts, Recording
    from pytest_seatrial.select.selection_session import SelectionSession


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seatrial", "seatrial")
    group.addoption("--seatrial-select", action="store_true", help="run only tests that the change affects, and record")
    group.addoption("--seatrial-record", action="store_true", help="run every test and record what it depends on")
    group.addoption("--seatrial-select-why", action="store_true", help="select, and say why for each selected test")
    parser.addini("seatrial_select_state", "the state file of the selection, relative to the root", default=".seatrial-select.sqlite")
    parser.addini("seatrial_select_skip", "globs of Python files that are not instrumented", type="linelist", default=[])
    parser.addini("seatrial_select_inputs", "globs of files that every test depends on", type="linelist", default=[])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before the first conftest is imported."""
    asked = early_config.known_args_namespace
    why = bool(asked.seatrial_select_why)
    if not (asked.seatrial_select or why or asked.seatrial_record):
        return
    from pytest_seatrial.select.recording import Recording
    from pytest_seatrial.select.selection_session import SelectionSession

    select = not asked.seatrial_record  # which wins over both of the others
    picked = bool(asked.keyword) or any("::" in str(one) for one in asked.file_or_dir)
    sitting = SelectionSession.begin(early_config, select=select, why=why, picked=picked)
    early_config.add_cleanup(sitting.close)
    recording = Recording(sitting)
    early_config.add_cleanup(recording.stop)
    selection = Selection(sitting, recording)
    early_config.pluginmanager.register(selection, "seatrial_selection")
    if sitting.role != "controller":
        selection.contexts = recording.start()
        early_config.pluginmanager.register(selection.contexts, "seatrial_contexts")


class Selection:
    """The hooks of a session that selects or records."""

    def __init__(self, sitting: SelectionSession, recording: Recording) -> None:
        self._sitting = sitting
        self._recording = recording
        self.contexts: Contexts | None = None

    def left_some_out(self) -> bool:
        """Whether there are tests that do not run, since they passed and nothing of theirs changed."""
        chosen = self._sitting.decided()
        return chosen is not None and chosen.selected < chosen.of

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        self._sitting.common()

    def pytest_report_header(self) -> list[str]:
        """Why everything will run, before it does."""
        asked = self._sitting.asked
        told = self._sitting.start().told if asked.select and not asked.picked else ""
        return [f"seatrial: every test runs: the map is not trusted: {told}"] if told else []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        asked = self._sitting.asked
        if not asked.select or asked.picked or self.contexts is None:
            return
        with self.contexts.aside():
            choices = self._sitting.choose(items)
        left = [item for item, choice in zip(items, choices, strict=True) if choice.why is None]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item, choice in zip(items, choices, strict=True) if choice.why is not None]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        chosen = self._sitting.decided()
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and chosen and chosen.of and not chosen.selected:
            session.exitstatus = pytest.ExitCode.OK
        self._recording.finish()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        chosen = self._sitting.decided()
        asked = self._sitting.asked
        lines = chosen.summary() if chosen else []
        if asked.select and asked.picked:
            lines = ["seatrial: tests were chosen on the command line: nothing was left out"]
        for line in [*lines, *self._recording.told]:
            terminalreporter.write_line(line)
