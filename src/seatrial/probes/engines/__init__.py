"""Instruments that run inside generation engines, or next to them."""
