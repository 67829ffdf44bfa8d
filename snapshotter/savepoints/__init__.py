"""Savepoints: self-contained copies of a query's state at one micro-batch, which belong to the user."""
