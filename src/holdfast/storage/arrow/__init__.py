"""Filesystems of pyarrow: HDFS, those that users pass in, fsspec's. `store` is the backend."""
