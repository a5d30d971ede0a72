"""Merge: of each unit the winning record, in unit order, complete or refused, written at once or not at all."""
