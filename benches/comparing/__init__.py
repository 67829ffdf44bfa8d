"""Compares two runs of the same suites: what became faster or slower, and what is noise."""
