"""Launching a campaign and following it: what is checked ahead, rounds of jobs, what a task runs, where it all stands."""
