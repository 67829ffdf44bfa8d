"""What came of it: the JSON document with its targets, and its tables."""
