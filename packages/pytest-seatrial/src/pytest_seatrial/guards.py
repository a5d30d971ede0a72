"""Guards of a suite, as a pytest plugin: the entry, which every pytest of the environment loads.

- The hooks are in `groups_plugin`. A pytest before 7.0, which has no stash, gets none of them: it runs as if we were not installed.
"""

from __future__ import annotations

import pytest

if hasattr(pytest, "StashKey"):
    from pytest_seatrial.groups_plugin import (
        pytest_addoption,  # noqa: F401 - pytest finds them here
        pytest_collection_modifyitems,  # noqa: F401 - pytest finds them here
        pytest_configure,  # noqa: F401 - pytest finds them here
        pytest_deselected,  # noqa: F401 - pytest finds them here
        pytest_load_initial_conftests,  # noqa: F401 - pytest finds them here
        pytest_make_collect_report,  # noqa: F401 - pytest finds them here
        pytest_runtest_makereport,  # noqa: F401 - pytest finds them here
        pytest_sessionfinish,  # noqa: F401 - pytest finds them here
        pytest_sessionstart,  # noqa: F401 - pytest finds them here
        pytest_terminal_summary,  # noqa: F401 - pytest finds them here
    )
