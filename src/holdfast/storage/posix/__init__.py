"""Files below a directory: local disks, NFS, Lustre, FUSE mounts. `store` is the backend."""
