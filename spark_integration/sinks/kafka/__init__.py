"""Kafka sink: workers prepare transactions, the driver ends them."""
