"""Turns definitions into Spark plans, on the driver."""
