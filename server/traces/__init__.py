"""Spans of requests, which say where their time went, and their export to OpenTelemetry.

Spans hold ids and figures, and never text of a prompt or an answer. Only `otlp` imports
OpenTelemetry's SDK, and only `server.assembly` imports `otlp`, where traces are asked for.
"""
