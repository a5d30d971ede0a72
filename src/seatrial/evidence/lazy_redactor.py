"""`Redactor.tokens` for what is printed or stored all the time: the rules are loaded only for text that may hold a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.model.secret_names import has_stem

if TYPE_CHECKING:
    from seatrial.evidence.redact import Redactor

_MAY_HOLD = re.compile(
    r"(?a:(?<![\w-])(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[\w-]{20,})|:(?:\\?/|_){2}(?:[^\s/]{0,1000}@|[^\s/]{1000})|BEGIN|\$\w{1,12}\$|\{S?(?:SHA|MD5|CRYPT)|hooks\.|ebhook"
)


class LazyRedactor:
    """Takes out what is a secret wherever it stands: values of the environment, tokens, credentials in URLs, key blocks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._values = tuple(value for name, value in environ.items() if has_stem(name.lower()) and len(value) >= 6)
        self._redactor: Redactor | None = None

    def tokens(self, text: str) -> str:
        """The text without them."""
        if not _MAY_HOLD.search(text) and not any(value in text for value in self._values):
            return text
        if self._redactor is None:
            from seatrial.evidence.redact import Redactor

            self._redactor = Redactor(self._environ)
        return self._redactor.tokens(text)
