"""`pytest --seatrial-select`: run only the tests that a change can reach, and record what each of them depends on.

- Off unless asked for: `--seatrial-select` selects and records, `--seatrial-record` runs everything and records, `--seatrial-select-why`
  selects and gives one line per selected test. Recording wins over selecting.
- `-k` or a node id on the command line decides alone; they are recorded all the same.
- Light at import: the standard library and pytest, and of that nothing which older versions lack.
"""

from __future__ import annotations

import pytest


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
    from pytest_seatrial.select.recording import Selection
    from pytest_seatrial.select.selection_session import SelectionSession

    select = not asked.seatrial_record  # which wins over both of the others
    picked = bool(asked.keyword) or any("::" in str(one) for one in asked.file_or_dir)
    session = SelectionSession.begin(early_config, select=select, why=why, picked=picked)
    early_config.add_cleanup(session.close)
    selection = Selection(session)
    early_config.add_cleanup(selection.stop)
    early_config.pluginmanager.register(selection, "seatrial_selection")
    if session.role != "controller":
        early_config.pluginmanager.register(selection.start(), "seatrial_contexts")
