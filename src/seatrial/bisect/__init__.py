"""Finds the commit that broke a command, a metric or a trial, over repositories, submodules and noise."""
