"""What lies on an executor's machine: directories, processes, leftovers of dead executors."""
