"""Results in a table of PostgreSQL, exactly once: prepared transactions, or staging tables and one transaction."""
