"""``transformWithState``: Spark's `StatefulProcessor` on state tables, read and written for many keys at once."""
