"""Hooks that wrap others, for old and new pluggy.

- Written once, in the new style: a generator that gets the result from `yield`, or the exception raised there, and returns the result.
- pluggy before 1.2 knows the older style only, and gets the same generator in that form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

import pytest

Hook = Callable[..., Generator[None, Any, Any]]
NEW = "wrapper" in inspect.signature(type(pytest.hookimpl).__call__).parameters


def wrapping(*, tryfirst: bool = False, new: bool = NEW) -> Callable[[Hook], Hook]:
    """As `pytest.hookimpl(wrapper=True)`."""

    def marked(function: Hook) -> Hook:
        if new:
            return pytest.hookimpl(wrapper=True, tryfirst=tryfirst)(function)
        return pytest.hookimpl(hookwrapper=True, tryfirst=tryfirst)(_older(function))

    return marked


def _older(function: Hook) -> Hook:
    @functools.wraps(function)
    def hook(*args: Any) -> Generator[None, Any, None]:
        inner = function(*args)
        next(inner)
        outcome = yield
        error: BaseException | None = None
        try:
            try:
                result = outcome.get_result()
            except BaseException as raised:  # noqa: BLE001 - whatever it is, the generator sees it, and it stays in the outcome
                error = raised
                inner.throw(raised)
            else:
                inner.send(result)
        except StopIteration as ended:
            outcome.force_result(ended.value)
        except BaseException as raised:
            if raised is not error:
                raise

    # pluggy 1.0 reads the names of arguments from here, and does not look through `wraps`
    hook.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return hook
