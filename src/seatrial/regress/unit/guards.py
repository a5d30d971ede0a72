"""Guards of a suite, as a pytest plugin: the entry, which every pytest of the environment loads.

- The hooks are in `guarding`. A pytest before 7.0, which has no stash, gets none of them: it runs as if we were not installed.
"""

from __future__ import annotations

import pytest

if hasattr(pytest, "StashKey"):
    from seatrial.regress.unit.guarding import (  # noqa: F401 - pytest finds them here
        pytest_addoption,
        pytest_collection_modifyitems,
        pytest_configure,
        pytest_deselected,
        pytest_load_initial_conftests,
        pytest_make_collect_report,
        pytest_runtest_makereport,
        pytest_sessionfinish,
        pytest_sessionstart,
        pytest_terminal_summary,
    )
