"""The host side of `seatrial probe`: runs instruments in an engine's interpreter and turns their facts into probe.json."""
