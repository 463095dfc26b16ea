"""`holdfast launch`: one command on every host, and the hosts find each other through a rendezvous.

`command` begins a job and chooses between two kinds of script. A script that calls `fit()` is run on every host; one is
elected to lead it (`election`, `fit`). A plain script for torchrun is run by every worker of every host, in rounds that
an elected host forms (`rounds`, `workers`). `job` is what both have in common: this host's place in the rendezvous.
"""
