"""Two revisions measured in one run."""
