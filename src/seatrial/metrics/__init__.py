"""Readers of metric files into series, and the check language."""
