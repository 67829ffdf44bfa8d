"""Objects as files in HDFS, without Java."""
