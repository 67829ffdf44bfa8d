"""What Spark keeps of a query in its checkpoint location, read without Spark: its logs, and the state with pointers."""
