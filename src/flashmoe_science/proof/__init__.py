"""The chain of proof: from the sources of a kernel to a verdict on a claim about it."""
