"""The parts of `holdfast.backends.local_files`: sealed files, locks on folders, and the mapping of errors."""
