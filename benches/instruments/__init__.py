"""Observes a run: its processes, its requests and the machine."""
