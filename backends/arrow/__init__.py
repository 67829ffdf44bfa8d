"""Arrow columns as state: questions about rows, what values may be, streams from storage."""
