"""Routing of tokens to experts, and the order in which experts read them."""
