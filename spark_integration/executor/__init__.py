"""An executor's machine: directories, processes, leftovers of dead executors."""
