"""Runs the measurements of suites, one engine at a time, into a directory from which a stopped run continues."""
