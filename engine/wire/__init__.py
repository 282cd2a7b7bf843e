"""What gateways and engines say to each other, and how it travels: messages, sockets, clients."""
