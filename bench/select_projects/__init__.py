"""Parts of bench/select_mutations.py."""
