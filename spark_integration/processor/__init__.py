"""``transformWithState``: Spark's `StatefulProcessor` on state tables, which are read for many keys at once."""
