"""Contract tests for those who write a backend or an object storage for holdfast.

A plug-in is right when it passes the same suites as the ones that holdfast ships; they are importable code without
dependencies on this project's own tests.
"""
