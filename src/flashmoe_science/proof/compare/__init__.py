"""Two revisions measured in one run, and runs shown side by side."""
