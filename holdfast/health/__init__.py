"""A query's health from what is stored: running, stopped, stale or failing; for the commands and the page."""
