"""Arrow columns as state: comparing and sorting rows, validating values, reading streams from storage."""
