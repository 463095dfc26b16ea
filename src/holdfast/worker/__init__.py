"""Inside a worker process, and the zygote that it is forked from: the job, the session, the beginning and the end."""
