"""The redactor for what is printed or stored all the time: its rules are loaded only for text that may hold a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.core.secret_names import has_stem

if TYPE_CHECKING:
    from seatrial.evidence.redact import Redactor

_MAY_HOLD = re.compile(
    r"(?a:(?<![\w-])(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[\w-]{20,})|:(?:\\?/|_){2}(?:[^\s/]{0,1000}@|[^\s/]{1000})|BEGIN|\$\w{1,12}\$|\{S?(?:SHA|MD5|CRYPT)|hooks\.|ebhook"
)


class LazyRedactor:
    """`Redactor.tokens` and `Redactor.text`, at the cost of a search where there is nothing to take out."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._values = tuple(value for name, value in environ.items() if has_stem(name.lower()) and len(value) >= 6)
        self._redactor: Redactor | None = None

    def tokens(self, text: str) -> str:
        """The text without what is a secret wherever it stands: values of the environment, tokens, credentials in URLs, key blocks."""
        return self._loaded().tokens(text) if self._may_hold(text) else text

    def text(self, text: str) -> str:
        """The text without secrets of any kind: also those behind a name, in a command or a table."""
        return self._loaded().text(text) if self._may_hold(text) or has_stem(text.lower()) else text

    def _may_hold(self, text: str) -> bool:
        return _MAY_HOLD.search(text) is not None or any(value in text for value in self._values)

    def _loaded(self) -> Redactor:
        if self._redactor is None:
            from seatrial.evidence.redact import Redactor

            self._redactor = Redactor(self._environ)
        return self._redactor
