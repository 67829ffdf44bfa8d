"""The suites of ``holdfast bench run``: questions, each answered by paired runs."""
