"""How a job is run: engines, each run in a process of its own, in turns."""
