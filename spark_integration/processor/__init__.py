"""``transformWithState``: Spark's `StatefulProcessor` on state tables, accessed for many keys at once."""
