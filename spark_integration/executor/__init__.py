"""An executor's machine: its directories and processes, and the files of dead executors."""
