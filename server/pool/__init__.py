"""The engines behind a gateway: who is there, which of them a request goes to, how many there should
be, and which requests are under way.

Only `engines` speaks to them. It imports the engine's messages and client, nothing of other rooms
but logs and faults; it owns the two files by which gateway and placer speak.
"""
