"""Objects in a bucket of S3, or of what speaks its protocol."""
