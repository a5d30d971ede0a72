"""One run of chosen levels of one loop on one change: plan, preflight, runner, verdict, comparison with the base."""
