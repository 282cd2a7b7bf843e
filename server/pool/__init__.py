"""The engines behind a gateway: who is there, which takes a request, how many there should be, and
which requests are under way.

The other rooms know `engines`, a Protocol; `engine_pool` speaks to the engines. It imports no other
room, and owns the two files by which gateway and placer speak.
"""
