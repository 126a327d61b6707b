"""Two revisions or two runs, side by side, and the history of a subject."""
