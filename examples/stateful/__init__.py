"""Small stateful queries to copy, each by a `StatefulProcessor` of Spark's and for all keys at once."""
