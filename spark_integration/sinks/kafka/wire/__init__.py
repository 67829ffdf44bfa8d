"""The few requests of Kafka's protocol that its client does not offer."""
