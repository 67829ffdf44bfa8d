"""`memory` and `filesystem`: versions as folders of run files, which every worker maps."""
