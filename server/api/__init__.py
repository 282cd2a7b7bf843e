"""HTTP: the endpoints, the formats of OpenAI's API, and the errors that clients receive.

This room alone knows HTTP statuses and headers: the rooms below raise errors of their own, and
`errors` gives each kind of fault its status. It may import every room below it, and of
`launch` only the settings. It owns no state; `server.api.gateway` holds a gateway process's parts.
"""
