"""Ctrl-C: the first is a request, the second is an order."""

from __future__ import annotations

import signal

import pytest

from seatrial.runtime.interrupt import Interrupted, Interruptible, check_stop, stop_requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_a_flag_and_second_raises(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruptible() as stop:
        stop.check()
        assert not stop_requested()
        signal.raise_signal(number)
        assert stop.signal == number
        assert stop_requested()
        with pytest.raises(Interrupted, match=number.name):
            stop.check()
        with pytest.raises(Interrupted):
            check_stop()
        with pytest.raises(Interrupted):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before
    assert not stop_requested()
    check_stop()


def test_handlers_come_back_after_an_exception() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), Interruptible():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) == before


def test_a_keyboard_interrupt_handler_catches_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise Interrupted(signal.SIGTERM)
