"""Where output lies: named bytes in a local folder or under a prefix of an object store.

Knows names and bytes, nothing of jobs, parts or Parquet.
"""
