"""Whose a directory in durable storage is: the operator's record, and the claims of runs."""
