"""The SQL database: reads on a pool, writes in groups, its clock, leases, and chores by lease.

This room imports no other room. It owns the connections and the table of leases; every other table
is owned by the room that declares it.
"""
