"""Object stores: a folder or S3; and the room on this machine's disk."""
