"""Our attention behind the signatures of others."""
