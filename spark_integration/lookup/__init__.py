"""Look-ups in queries from outside, without Spark: keys, their history, pages of rows, differences."""
