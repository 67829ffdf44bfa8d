"""The object storage boundary, and what is behind it: a local disk, S3, HDFS, any fsspec URL."""
