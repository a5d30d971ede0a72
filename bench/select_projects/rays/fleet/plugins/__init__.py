"""Plugins; nobody imports them by a statement."""
