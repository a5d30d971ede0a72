"""Inputs of a campaign: rows of JSONL and Parquet files, each checked before anything starts, with an id that stays its own."""
