"""The engines behind a gateway: which there are, which takes a request, how many there should be,
and which requests are under way.

The other rooms know `engines`, a Protocol; `engine_pool` speaks to the engines. This room imports
no other room, and owns the control files, by which supervisor, placer and gateways communicate.
"""
