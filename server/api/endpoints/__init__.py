"""HTTP endpoints, one file per resource: parse, call one piece of `server`, render."""
