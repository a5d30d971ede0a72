"""Secrets among loop arguments, in the forms that loops take them."""

from __future__ import annotations

import pytest

from seatrial.core.errors import UserError
from seatrial.trial import staging

SECRET = "zq81-not-to-be-seen"


@pytest.mark.parametrize(
    "words",
    [("--hub_token", SECRET), (f"--hub_token={SECRET}",), (f"trainer.wandb_api_key={SECRET}",), (f"++a.b.api_key={SECRET}",)],
)
def test_a_secret_is_hidden_and_cannot_be_sent_elsewhere(words: tuple[str, ...]) -> None:
    redactor = staging.redactor(words)
    assert SECRET not in " ".join(redactor.value(words))
    assert SECRET not in redactor.text(f"verl says {SECRET} here")
    with pytest.raises(UserError, match="is a secret, which is not stored") as caught:
        staging.refuse(words)
    assert SECRET not in caught.value.message


def test_ordinary_arguments_are_left_alone() -> None:
    words = ("--learning_rate", "1e-4", "actor_rollout_ref.rollout.n=4", "++trainer.logger=[console]")
    staging.refuse(words)
    assert staging.redactor(words).value(words) == words
