"""Where generator and trainer disagree: from token rows to what the disagreement follows. Pure analysis, no files."""
