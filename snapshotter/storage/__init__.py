"""The object storage boundary, and what stands behind it: a local disk, S3, HDFS, any fsspec URL."""
