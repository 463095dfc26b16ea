"""Where hosts that are started separately find each other: small keys in etcd or in a directory that all hosts share.

`rendezvous` states what a backend must do, `etcd` and `directory` do it, `session` keeps a host's keys there while it
lives, `uri` reads what `holdfast launch --rdzv` is given. Nothing here decides whose checkpoints count: that is the
store's epochs (`holdfast.checkpoint.epochs`), whatever the rendezvous says.
"""
