"""The engines behind a gateway: who is there, which of them a request goes to, how many there
should be, and who keeps them running on one machine. Only `engines` speaks to them; on a cluster
`server.cluster` keeps them.
"""
