"""Functional scripts: plan, run and judge them; containers and fresh environments to run any command in."""
