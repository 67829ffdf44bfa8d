"""Arrow columns as state: comparing and sorting rows, valid values, streams from storage."""
