"""Results in a Kafka topic: prepared transactions, ended by the driver."""
