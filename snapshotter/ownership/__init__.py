"""Who owns a directory in durable storage: the operator's record, and the claims of runs."""
