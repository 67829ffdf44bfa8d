"""What stands on an executor's machine: directories, processes, what dead executors left."""
