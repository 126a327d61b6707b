"""Calls over several ranks of one host: a process for each, in lockstep, with one result."""
