"""An operator of a user's own, found beside the kernel.toml."""
