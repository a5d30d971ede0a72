"""Placeholders, in a shell and in Python: both must give the same words, whatever else stands in them."""

from __future__ import annotations

import subprocess

import pytest

from seatrial.core.jobs import bash_word, fill, grouped, referred

VALUES = {"SEATRIAL_PORT": "8 0$(id)", "SEATRIAL_URLS_MY_SERVER": "http://a:1,http://b:2", "SEATRIAL_INDEX": "7"}

WORDS = [
    "",
    "plain",
    "--port={port}",
    "{port}",
    "{urls:my-server}/v1",
    "a'b\"c $(id) `id` \\ ; & | > {index} é\n\ttwo",
    '{"json": {"port": 1}}',
    "{unknown} {port",
    "${HOME}",
    "-",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_shell_sees_what_python_sees(word: str) -> None:
    printed = subprocess.run(
        ["bash", "-uc", f"printf '%s' {bash_word(word)}"], env={**VALUES, "HOME": "wrong"}, capture_output=True, text=True, check=True
    )
    assert printed.stdout == fill(word, VALUES)


def test_a_placeholder_without_value_is_an_error_in_both() -> None:
    assert subprocess.run(["bash", "-uc", f"echo {bash_word('{copy}')}"], env={}, capture_output=True, check=False).returncode != 0
    with pytest.raises(KeyError):
        fill("{copy}", {})


def test_services_that_are_referred_to_are_named_once() -> None:
    assert referred(("{url:a}", "{urls:b},{url:a}", "{port}")) == ("a", "b")


def test_options_stand_on_lines_of_their_own() -> None:
    assert grouped(["vllm", "serve", "m", "--port", "1", "-x"]) == ["vllm serve m", "--port 1", "-x"]
