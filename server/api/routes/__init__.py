"""HTTP endpoints, one file a resource: parse, call one piece of `server`, render."""
