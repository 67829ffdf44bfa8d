"""The object storage boundary and its implementations: a local disk, S3, HDFS, any fsspec URL."""
