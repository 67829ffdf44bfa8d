"""PostgreSQL sink: exactly-once rows through prepared transactions, or staging tables that the driver applies."""
