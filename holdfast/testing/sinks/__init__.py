"""What the contract of a two-phase sink is made of: processes to kill, steps of a query, tests."""
